"""How the pages are built: ``make docs``, with warnings as errors.

The sources begin at the root of the repository, since pages link to README, ARCHITECTURE and the folder
of the unit. A new page needs no entry: the contents are all pages that there are.
"""

from sphinx.application import Sphinx

project = "rallypoint"
extensions = ["myst_parser"]
root_doc = "docs/README"
include_patterns = ["*.md", "docs/**", "ops/**/*.md", "systemd/*.md"]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests"]  # not even walked through
html_theme = "alabaster"
html_theme_options = {"page_width": "80em", "sidebar_width": "18em"}
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 4  # links to headings, as on a forge
nitpicky = True


def _add_contents(app: Sphinx, page: str, text: list[str]) -> None:
    """A forge would show the directive as text, so the page itself has none."""
    if page == root_doc:
        pages = sorted(app.env.found_docs - {root_doc}, key=lambda name: (name != "README", name))
        listed = "".join(f"/{name}\n" for name in pages)
        text[0] += f"\n\n```{{toctree}}\n:hidden:\n\n{listed}```\n"


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("source-read", _add_contents)
    return {"parallel_read_safe": True}
