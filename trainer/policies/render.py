"""Draws a recorded motion without a display: ``python -m rallypoint.trainer.policies.render FOLDER``.

A process of its own, since MuJoCo takes its renderer from ``MUJOCO_GL`` once, when it is imported. The
folder has ``motion.npz`` and ``drawing.json`` (`Drawing`); the picture or video is written into it.
Exit code 3: this renderer does not work here.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import matplotlib.image
import msgspec
import mujoco
import numpy as np
from numpy.typing import NDArray

from rallypoint.trainer.policies.errors import MissingExtra

NO_RENDERER: Final = 3
MOTION: Final = "motion.npz"
DRAWING: Final = "drawing.json"
Image = NDArray[np.uint8]

_FLOOR_RGB: Final = ((0.16, 0.20, 0.26), (0.22, 0.27, 0.34))
_BODY_RGBA: Final = (0.93, 0.58, 0.22, 1.0)
_LIMB_RGBA: Final = (0.80, 0.82, 0.86, 1.0)


class Drawing(msgspec.Struct, frozen=True):
    """What is drawn, and how."""

    mjcf: str
    output: str
    """Name of the file: ``.png`` has the last frame, ``.mp4`` all."""
    fps: float
    width: int
    height: int
    distance_m: float
    """Of the camera from what it looks at."""
    follows: bool
    """The camera goes with the first body; else it looks at where that stands at first."""


def model_of(mjcf: str) -> Any:
    """The model with a floor, light and colours to look at; nothing that moves is changed."""
    spec = mujoco.MjSpec.from_string(mjcf)
    visual = spec.visual
    visual.headlight.ambient = (0.35, 0.35, 0.35)
    visual.headlight.diffuse = (0.35, 0.35, 0.35)
    visual.quality.shadowsize = 1024  # drawn anew for each frame, by the processor
    visual.global_.offwidth, visual.global_.offheight = 3840, 2160
    spec.add_texture(
        name="sky",
        type=mujoco.mjtTexture.mjTEXTURE_SKYBOX,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_GRADIENT,
        rgb1=(0.62, 0.72, 0.84),
        rgb2=(0.93, 0.95, 0.97),
        width=256,
        height=256,
    )
    spec.add_texture(
        name="floor",
        type=mujoco.mjtTexture.mjTEXTURE_2D,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_CHECKER,
        rgb1=_FLOOR_RGB[0],
        rgb2=_FLOOR_RGB[1],
        width=256,
        height=256,
    )
    floor = spec.add_material(name="floor", texrepeat=(1, 1), texuniform=True, reflectance=0.0)
    floor.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "floor"
    for geom in spec.geoms:
        if geom.type == mujoco.mjtGeom.mjGEOM_PLANE:
            geom.material = "floor"
        else:
            boxy = geom.type == mujoco.mjtGeom.mjGEOM_BOX
            geom.rgba = _BODY_RGBA if boxy else _LIMB_RGBA
    if not any(geom.type == mujoco.mjtGeom.mjGEOM_PLANE for geom in spec.geoms):
        spec.worldbody.add_geom(
            type=mujoco.mjtGeom.mjGEOM_PLANE, size=(0, 0, 1), pos=(0, 0, -0.2), material="floor"
        )
    spec.bodies[1].add_light(
        mode=mujoco.mjtCamLight.mjCAMLIGHT_TRACK,
        type=mujoco.mjtLightType.mjLIGHT_SPOT,
        pos=(-1, -1, 5),
        dir=(0.2, 0.2, -1),
        cutoff=60,
        diffuse=(0.7, 0.7, 0.7),
        castshadow=True,
    )
    return spec.compile()


def frames(drawing: Drawing, qpos: NDArray[np.float64]) -> Iterator[Image]:
    """One image ``[height, width, 3]`` for each of the generalised positions ``[F, nq]``."""
    model = model_of(drawing.mjcf)
    data = mujoco.MjData(model)
    renderer = mujoco.Renderer(model, drawing.height, drawing.width)
    camera = mujoco.MjvCamera()
    camera.distance, camera.azimuth, camera.elevation = drawing.distance_m, 125.0, -18.0
    for index, positions in enumerate(qpos):
        data.qpos[:] = positions
        mujoco.mj_forward(model, data)
        if drawing.follows or index == 0:
            camera.lookat[:] = data.xpos[1]
        renderer.update_scene(data, camera)
        yield renderer.render()


def write_video(path: Path, images: Iterator[Image], drawing: Drawing) -> None:
    """H.264 in MP4. Raises `MissingExtra` without the package ``av``."""
    try:
        import av  # an extra
    except ImportError as error:
        raise MissingExtra("av", "play") from error
    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=round(drawing.fps))
        stream.width, stream.height, stream.pix_fmt = drawing.width, drawing.height, "yuv420p"
        stream.options = {"crf": "20", "preset": "veryfast"}
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def draw(folder: Path) -> int:
    """Exit code."""
    drawing = msgspec.json.decode((folder / DRAWING).read_bytes(), type=Drawing)
    with np.load(folder / MOTION, allow_pickle=False) as motion:
        qpos = motion["qpos"]
    output = folder / drawing.output
    still = output.suffix == ".png"
    try:
        images = frames(drawing, qpos[-1:] if still else qpos)
        first = next(images)
    except Exception as error:  # noqa: BLE001 - each renderer has errors of its own: the next may work
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return NO_RENDERER
    if still:
        matplotlib.image.imsave(output, first)
        return 0
    try:
        write_video(output, _chain(first, images), drawing)
    except MissingExtra as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _chain(first: Image, others: Iterator[Image]) -> Iterator[Image]:
    yield first
    yield from others


if __name__ == "__main__":
    code = draw(Path(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # renderers in software are known to fail while they are taken down
