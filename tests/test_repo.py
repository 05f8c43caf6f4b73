"""The repository holds to its own rules: sizes, errors, docstrings, layout, links, options."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from rallypoint.checkpointing.manifest import SCHEMA
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.failpoints import NAMES
from tests.project import (
    CODE_FOLDERS,
    ROOT,
    code_files,
    project_files,
    python_files,
    report,
    source,
    tree,
)

FOLDERS = {*CODE_FOLDERS, "docs", "src", "systemd", "tests"}
MODULE_LINES = 400
FUNCTION_LINES = 60

# Growth is a decision: a new option is added here, in its dataclass and in ARCHITECTURE.md.
OPTIONS = {
    "job": "name iterations env_steps seed profile min_workers max_workers spares warm_start",
    "node": "name bind advertise interface workers devices fork_server stop_grace_s",
    "membership": "backend endpoints ca_file cert_file key_file user password_file"
    " detect_s hang_s join_debounce_s orphan_grace_s quarantine_after quarantine_cooldown_s",
    "env": "backend task overrides budget num_envs block max_envs backup",
    "ppo": "rollout_steps epochs mini_batches mini_batch_of permutation_scope permutation_every"
    " micro_batches gamma lam time_out_bootstrap advantage_scope advantage_ddof clip value_loss"
    " learning_rate learning_rate_bounds learning_rate_decision desired_kl kl_form max_grad_norm"
    " grad_clip value_coef entropy_coef hidden critic_hidden activation noise init_std std_bounds"
    " std_clamp normalise_actor normalise_critic normaliser_form normaliser_clip normaliser_prior"
    " normaliser_update dtype reduction autocast compile",
    "sampler": "kind uniform cap_ratio alpha bin_cap clip_cap sonic_mean_every",
    "aux": "latent privileged_share reconstruction_coef latent_coef scale",
    "distill": "teacher coef ppo_coef beta beta_iterations",
    "checkpoint": "url credentials_file every_iterations every_s keep_last keep_every"
    " keep_best keep_best_metric keep_best_order local_every_iterations"
    " local_keep_last env_rows",
    "metrics": "bind port cert_file key_file client_ca_file users_file",
    "preemption": "sources aws_url gcp_url azure_url",
    "curves": "tensorboard directory wandb wandb_project wandb_mode",
    "log": "level format worker_file_bytes worker_files",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


# --- sizes and style ----------------------------------------------------------------------------


def test_modules_are_small() -> None:
    counts = {path: len(source(path).splitlines()) for path in python_files()}
    report(
        (f"{path}: {lines} lines" for path, lines in counts.items() if lines > MODULE_LINES),
        f"split by responsibility, at most {MODULE_LINES} lines",
    )


def test_functions_are_small() -> None:
    report(
        (
            f"{path}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
            for path in python_files()
            for node in ast.walk(tree(path))
            if isinstance(node, Function)
            and node.end_lineno is not None
            and node.end_lineno - node.lineno >= FUNCTION_LINES
        ),
        f"at most {FUNCTION_LINES} lines",
    )


def _is_broad(kind: ast.expr | None) -> bool:
    match kind:
        case None | ast.Name(id="Exception" | "BaseException"):
            return True
        case ast.Tuple(elts=kinds):
            return any(map(_is_broad, kinds))
        case _:
            return False


def _comment(line: str) -> str:
    """Words of the comment on a line, without directives to the linter."""
    return re.sub(r"(noqa|type: ignore)\S*( [A-Z]+\d+)*", "", line.partition("#")[2]).strip()


def test_a_broad_except_says_why() -> None:
    def unexplained(path: Path) -> Iterator[str]:
        lines = ["", *source(path).splitlines()]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
                above = lines[node.lineno - 1]
                if not _comment(lines[node.lineno]) and not (
                    above.strip().startswith("#") and _comment(above)
                ):
                    yield f"{path}:{node.lineno} {lines[node.lineno].strip()}"

    report(
        (finding for path in python_files() for finding in unexplained(path)),
        "catch what is meant, or say on the line why everything is",
    )


def public_definitions(
    node: ast.Module | ast.ClassDef, prefix: str = ""
) -> Iterator[tuple[str, Definition]]:
    """Public classes, functions and methods, with their dotted names."""
    for child in node.body:
        if isinstance(child, Definition) and not child.name.startswith("_"):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from public_definitions(child, f"{prefix}{child.name}.")


def test_public_things_have_docstrings() -> None:
    """Two kinds of method need none: of one statement, or with a name that a Protocol documents."""
    found = [(path, *item) for path in code_files() for item in public_definitions(tree(path))]
    methods = [node for _, name, node in found if "." in name and isinstance(node, Function)]
    documented = {method.name for method in methods if ast.get_docstring(method)}
    exempt = {method for method in methods if len(method.body) == 1 or method.name in documented}
    report(
        (
            f"{path}:{node.lineno} {name}"
            for path, name, node in found
            if not ast.get_docstring(node) and node not in exempt
        ),
        "say what it is for, with shapes, units and errors",
    )
    report(
        (str(path) for path in code_files() if not ast.get_docstring(tree(path))),
        "a module says what it owns",
    )


def test_imports_are_absolute() -> None:
    report(
        (
            f"{path}:{node.lineno}"
            for path in python_files()
            for node in ast.walk(tree(path))
            if isinstance(node, ast.ImportFrom) and node.level
        ),
        "import rallypoint.…: a relative import gives checkers a second copy of the module",
    )


def test_nothing_is_left_to_do() -> None:
    marker = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b")
    report(
        (
            f"{path}:{number} {line.strip()}"
            for path in python_files()
            for number, line in enumerate(source(path).splitlines(), 1)
            if marker.search(line)
        ),
        "do it now, or file it",
    )


# --- layout and text ----------------------------------------------------------------------------


def test_layout() -> None:
    found = {path.parts[0] for path in project_files() if len(path.parts) > 1}
    report((name for name in found - FOLDERS if name[0] != "."), "the top-level folders are fixed")
    for name in CODE_FOLDERS:
        link = ROOT / "src/rallypoint" / name
        assert link.is_symlink(), f"{link} is a copy: check out where links are supported"
        assert link.readlink() == Path("../..", name)
        assert (link / "__init__.py").is_file()
    report(
        (
            str(path.parent)
            for path in code_files()
            if not (ROOT / path.parent / "__init__.py").is_file()
        ),
        "a folder of code has an __init__.py, else it is missing from the wheel",
    )


def test_test_files_have_unique_names() -> None:
    names = [path.name for path in python_files() if path.name.startswith("test_")]
    report(
        (name for name in set(names) if names.count(name) > 1), "name the second after its topic"
    )


MACHINE = re.compile(
    r"(?<![\w.}-])/(?:home|Users|root|work|workspace|farm|mnt|scratch)/\w"
    r"|\b(?:pypi|npmjs|pythonhosted|crates|debian|pytorch)\.(?:org|com|io)\b"
)


def test_no_machine_paths_or_registry_hosts() -> None:
    def findings(path: Path) -> Iterator[str]:
        try:
            text = source(path)
        except UnicodeDecodeError:
            return  # a picture
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE.search(line) or f"{ROOT}/" in line:
                yield f"{path}:{number} {line.strip()[:100]}"

    files = [path for path in project_files() if (ROOT / path).is_file()]
    report(
        (finding for path in files for finding in findings(path)),
        "say it without the paths of one machine or the address of a package registry",
    )


def _anchors(path: Path) -> set[str]:
    """Anchors that the headings of a Markdown file make."""
    headings = re.findall(r"^#+ +(.+?) *$", _prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def _prose(path: Path) -> str:
    """Markdown without its code blocks."""
    return re.sub(r"^```.*?^```", "", source(path), flags=re.MULTILINE | re.DOTALL)


def test_markdown_links_are_alive() -> None:
    def dead(path: Path) -> Iterator[str]:
        links = re.findall(r"\]\(<?([^)\s>]+)|^\[[^\]]+\]: +(\S+)", _prose(path), re.MULTILINE)
        for link in (inline or reference for inline, reference in links):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (ROOT / path.parent / name).resolve() if name else ROOT / path
            if not target.exists() or not target.is_relative_to(ROOT):
                yield f"{path}: {link}"
            elif anchor and anchor not in _anchors(target.relative_to(ROOT)):
                yield f"{path}: {link} (no such heading)"

    pages = [path for path in project_files() if path.suffix == ".md"]
    report((link for path in pages for link in dead(path)), "mend or remove the link")


def test_commands_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", source(Path("Makefile")), re.MULTILINE))
    report(
        (
            f"{path}: make {target}"
            for path in project_files()
            if path.suffix == ".md"
            for target in re.findall(r"(?:^|`)make ([a-z-]+)", source(path), re.MULTILINE)
            if target not in targets
        ),
        "the Makefile has no such target",
    )


# --- configuration and failpoints ---------------------------------------------------------------


def sections() -> dict[str, type]:
    return get_type_hints(Config)


def test_configuration_options_are_the_agreed_ones() -> None:
    found = {name: [option.name for option in fields(kind)] for name, kind in sections().items()}
    assert found == {name: options.split() for name, options in OPTIONS.items()}


def test_every_configuration_option_is_read() -> None:
    """Somewhere in the code, beside the schema and the sets of values that fill it in."""
    read = {
        node.attr
        for path in code_files()
        if path.name not in ("config.py", "profiles.py", "tasks.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    named = {"job.profile"}  # read by its path, before there is a configuration
    report(
        (
            f"{section}.{option.name}"
            for section, kind in sections().items()
            for option in fields(kind)
            if option.name not in read and f"{section}.{option.name}" not in named
        ),
        "a key that nothing reads has no place in the schema",
    )


def test_every_configuration_option_is_documented() -> None:
    def undocumented(section: ast.ClassDef) -> Iterator[str]:
        for node, after in zip(section.body, [*section.body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and not (
                isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            ):
                yield f"{section.name}.{ast.unparse(node.target)}"

    module = tree(Path("daemon/shared/config.py"))
    classes = [
        node for node in module.body if isinstance(node, ast.ClassDef) and node.name != "Config"
    ]
    assert {node.name for node in classes} == {kind.__name__ for kind in sections().values()}
    report((item for node in classes for item in undocumented(node)), "a string under the field")


def test_every_schema_of_checkpoints_has_a_fixture() -> None:
    """Whoever raises the schema commits a checkpoint that has it; the tests restore each for ever."""
    folder = ROOT / "tests/checkpointing/fixtures"
    found = {path.parents[1].name for path in folder.glob("schema_*/*/manifest.json")}
    assert found == {f"schema_{number}" for number in range(1, SCHEMA + 1)}


def failpoints_hit() -> set[str]:
    """Names given, as literals, to ``hit``, or to ``find``, which asks whether one is armed."""
    return {
        argument.value
        for path in code_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and re.search(r"\b_?(hit|find)$", ast.unparse(node.func))
        for argument in node.args[:1]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


def test_failpoints_are_hit_and_listed() -> None:
    report(set(NAMES) ^ failpoints_hit(), "NAMES and the calls of hit() and find() must agree")
    listed = source(Path("ARCHITECTURE.md"))
    report((name for name in NAMES if f"`{name}`" not in listed), "list it in ARCHITECTURE.md")


# --- tests by number ----------------------------------------------------------------------------

NUMERIC = {*range(1, 35), *range(36, 41)}
"""Numbers of the specification's reference tests of the trainer."""
RULES = {*range(1, 12)}
"""Numbers of the rules of membership."""


@pytest.mark.parametrize(("kind", "numbers"), [("numeric", NUMERIC), ("rule", RULES)])
def test_every_number_of_the_specification_has_its_test(kind: str, numbers: set[int]) -> None:
    """``test_numeric_01_12_what_it_shows`` shows numbers 1 and 12, ``test_rule_09_what_it_shows`` rule 9.
    None is ever skipped."""
    tests = [
        node
        for path in python_files()
        for node in ast.walk(tree(path))
        if isinstance(node, Function) and node.name.startswith(f"test_{kind}_")
    ]
    shown = (re.sub(rf"^test_{kind}_((?:\d\d_)*).*", r"\1", node.name) for node in tests)
    found = {int(number) for group in shown for number in group.split("_") if number}
    report((f"number {n}" for n in numbers - found), f"a test named test_{kind}_NN_… shows it")
    report(
        (node.name for node in tests if re.search(r"\b(skip|skipif|xfail)\b", ast.unparse(node))),
        "tests by number run everywhere",
    )
