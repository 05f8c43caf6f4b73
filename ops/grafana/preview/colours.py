"""Colours of the pictures: Grafana's, in its dark theme."""

from collections.abc import Mapping
from typing import Final

from rallypoint.ops.grafana.model import Colour

HEX: Final[Mapping[Colour, str]] = {
    "green": "#73BF69",
    "light-green": "#B7E3B0",
    "red": "#F2495C",
    "orange": "#FF9830",
    "yellow": "#FADE2A",
    "blue": "#5794F2",
    "light-blue": "#8AB8FF",
    "purple": "#B877D9",
    "text": "#CCCCDC",
}
PALETTE: Final = (
    *("#73BF69", "#FADE2A", "#8AB8FF", "#FF9830", "#F2495C", "#5794F2"),
    *("#B877D9", "#56A64B", "#E0B400", "#3274D9", "#FFB357", "#A352CC"),
)


def by_threshold(value: float, base: Colour, steps: tuple[tuple[float, Colour], ...]) -> Colour:
    """The colour of the last step that the value has reached."""
    reached = [colour for start, colour in steps if value >= start]
    return reached[-1] if reached else base
