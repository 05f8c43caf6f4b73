"""Robots for Isaac Lab, made of primitive shapes: its wheel has none, and its tasks look for their files
below ``ISAACSIM_ASSET_ROOT``.

``python -m tests.fakes.isaac_assets FOLDER`` writes all of them; needs ``pxr`` (usd-exchange) and newton.
"""

import importlib
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any, Final

PLANE: Final = (
    "Isaac/IsaacLab/Environments/Grid/default_ground_plane_checker_v1/default_ground_plane.usda"
)
CARTPOLE: Final = "Isaac/IsaacLab/Robots/Classic/Cartpole/cartpole.usd"
ANT: Final = "Isaac/Robots/IsaacSim/Ant/ant_instanceable.usd"
GO2: Final = "Isaac/IsaacLab/Robots/Unitree/Go2/go2.usd"

Vector = tuple[float, float, float]


def author(root: Path) -> Path:
    """Write the ground plane, Cartpole, Ant and Go2 below ``root``; returns it."""
    _plane(root / PLANE)
    _cartpole(root / CARTPOLE)
    _go2(root / GO2)
    newton = importlib.util.find_spec("newton")
    if newton is None or newton.origin is None:
        raise ModuleNotFoundError("newton is not installed; its ant is Isaac Lab's")
    (root / ANT).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(newton.origin).parent / "examples/assets/ant.usda", root / ANT)
    return root


class _Robot:
    """A USD stage with one articulation below ``/robot``."""

    def __init__(self, path: Path) -> None:
        pxr = {name: importlib.import_module(f"pxr.{name}") for name in ("Gf", "Usd", "UsdGeom")}
        self.gf, self.usd, self.geom = pxr["Gf"], pxr["Usd"], pxr["UsdGeom"]
        self.physics = importlib.import_module("pxr.UsdPhysics")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.stage: Any = self.usd.Stage.CreateNew(str(path))
        self.geom.SetStageUpAxis(self.stage, self.geom.Tokens.z)
        self.geom.SetStageMetersPerUnit(self.stage, 1.0)
        root = self.geom.Xform.Define(self.stage, "/robot").GetPrim()
        self.stage.SetDefaultPrim(root)
        self.root = root

    def body(
        self,
        name: str,
        at: Vector,
        mass_kg: float,
        inertia: Vector | None = None,
        centre: Vector = (0, 0, 0),
    ) -> str:
        """A rigid body; its path. ``inertia`` (kg m², about its axes) is that at its ``centre`` of mass;
        left out, the simulator's own counts, which is not that of shapes that do not collide."""
        path = f"/robot/{name}"
        frame = self.geom.Xform.Define(self.stage, path)
        frame.AddTranslateOp().Set(self.gf.Vec3d(*at))
        frame.AddOrientOp(self.geom.XformOp.PrecisionDouble).Set(self.gf.Quatd(1))
        frame.AddScaleOp(self.geom.XformOp.PrecisionDouble).Set(self.gf.Vec3d(1))
        self.physics.RigidBodyAPI.Apply(frame.GetPrim())
        mass = self.physics.MassAPI.Apply(frame.GetPrim())
        mass.CreateMassAttr(mass_kg)
        if inertia is not None:
            mass.CreateDiagonalInertiaAttr(self.gf.Vec3f(*inertia))
            mass.CreatePrincipalAxesAttr(self.gf.Quatf(1))
            mass.CreateCenterOfMassAttr(self.gf.Vec3f(*centre))
        return path

    def box(self, body: str, size: Vector, at: Vector = (0, 0, 0), *, collides: bool) -> None:
        """A box of a body."""
        cube = self.geom.Cube.Define(self.stage, f"{body}/shape")
        cube.CreateSizeAttr(1.0)
        cube.AddTranslateOp().Set(self.gf.Vec3d(*at))
        cube.AddScaleOp().Set(self.gf.Vec3f(*size))
        if collides:
            self.physics.CollisionAPI.Apply(cube.GetPrim())

    def ball(self, body: str, radius_m: float) -> None:
        """A ball at the origin of a body."""
        sphere = self.geom.Sphere.Define(self.stage, f"{body}/shape")
        sphere.CreateRadiusAttr(radius_m)
        self.physics.CollisionAPI.Apply(sphere.GetPrim())

    def joint(self, kind: str, path: str, ends: tuple[str | None, str], at: Vector) -> Any:
        """A joint of the class ``kind`` between two bodies (None: the world), at ``at`` of the first."""
        joint = getattr(self.physics, kind).Define(self.stage, path)
        if ends[0] is not None:
            joint.CreateBody0Rel().SetTargets([ends[0]])
        joint.CreateBody1Rel().SetTargets([ends[1]])
        joint.CreateLocalPos0Attr(self.gf.Vec3f(*at))
        joint.CreateLocalPos1Attr(self.gf.Vec3f(0))
        joint.CreateLocalRot0Attr(self.gf.Quatf(1))
        joint.CreateLocalRot1Attr(self.gf.Quatf(1))
        return joint

    def drive(self, joint: Any, kind: str, most: float) -> None:
        """Let an actuator move a joint: kind ``angular`` or ``linear``, greatest torque or force."""
        self.physics.DriveAPI.Apply(joint.GetPrim(), kind).CreateMaxForceAttr(most)

    def save(self) -> None:
        """Write the file."""
        self.physics.ArticulationRootAPI.Apply(self.root)
        self.stage.Save()


def _plane(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '#usda 1.0\n(\n    defaultPrim = "World"\n    upAxis = "Z"\n)\n'
        'def Xform "World"\n{\n    def Plane "CollisionPlane" (\n'
        '        prepend apiSchemas = ["PhysicsCollisionAPI"]\n    )\n    {\n'
        '        uniform token axis = "Z"\n        token visibility = "invisible"\n    }\n}\n'
    )


def _cartpole(path: Path) -> None:
    """Sizes, masses and joints of Isaac Lab's own, of which newton's
    ``examples/assets/cartpole_single_pendulum.usda`` is a copy (its default prim does not exist)."""
    robot = _Robot(path)
    half = 2**-0.5  # the rail lies along y of the world: a quarter turn about z
    quarter = robot.gf.Quatf(half, 0, 0, half)
    slider = robot.body("slider", (0, 0, 0), 1.0)
    robot.box(slider, (0.03, 8.0, 0.03), collides=False)
    cart = robot.body("cart", (0, 0, 0), 1.0)
    robot.box(cart, (0.2, 0.25, 0.2), collides=False)
    middle = (0.0, 0.0, 0.47)
    pole = robot.body("pole", (0.12, 0, 0), 1.0, (0.0836, 0.0835, 0.0004), middle)  # of the box
    robot.box(pole, (0.04, 0.06, 1.0), middle, collides=False)
    robot.joint("FixedJoint", "/robot/root_joint", (None, slider), (0, 0, 0))
    rail = robot.joint("PrismaticJoint", f"{slider}/slider_to_cart", (slider, cart), (0, 0, 0))
    rail.CreateAxisAttr("X")
    rail.CreateLocalRot0Attr(quarter)
    rail.CreateLocalRot1Attr(quarter)
    rail.CreateLowerLimitAttr(-4.0)
    rail.CreateUpperLimitAttr(4.0)
    robot.drive(rail, "linear", 1000.0)
    hinge = robot.joint("RevoluteJoint", f"{cart}/cart_to_pole", (cart, pole), (0.12, 0, 0))
    hinge.CreateAxisAttr("X")
    robot.drive(hinge, "angular", 1000.0)
    robot.save()


def _go2(path: Path) -> None:
    robot = _Robot(path)
    base = robot.body("base", (0, 0, 0), 6.9, (0.03, 0.1, 0.11))
    robot.box(base, (0.38, 0.094, 0.114), collides=True)
    for leg, forward, left in (("FL", 1, 1), ("FR", 1, -1), ("RL", -1, 1), ("RR", -1, -1)):
        _leg(robot, base, leg, (0.193 * forward, 0.0465 * left, 0.0), 0.0955 * left)
    robot.save()


def _leg(robot: _Robot, base: str, leg: str, at: Vector, aside_m: float) -> None:
    """Hip, thigh, calf and foot, hanging straight down."""
    x, y, link_m = at[0], at[1], 0.213
    hip = robot.body(f"{leg}_hip", at, 0.68, (5e-4, 9e-4, 6e-4))
    thigh = robot.body(f"{leg}_thigh", (x, y + aside_m, 0), 1.15, (6e-3, 6e-3, 1e-3))
    robot.box(thigh, (0.0245, 0.034, link_m), (0, 0, -link_m / 2), collides=True)
    calf = robot.body(f"{leg}_calf", (x, y + aside_m, -link_m), 0.154, (1.1e-3, 1.1e-3, 5e-5))
    foot = robot.body(f"{leg}_foot", (x, y + aside_m, -2 * link_m), 0.04, (1e-5, 1e-5, 1e-5))
    robot.ball(foot, 0.022)
    joints = (
        ("hip", base, hip, "X", at, (-60, 60), 23.7),
        ("thigh", hip, thigh, "Y", (0, aside_m, 0), (-90, 200), 23.7),
        ("calf", thigh, calf, "Y", (0, 0, -link_m), (-156, -48), 45.43),
    )
    for name, above, below, axis, where, limits_deg, torque_n_m in joints:
        joint = robot.joint(
            "RevoluteJoint", f"{above}/{leg}_{name}_joint", (above, below), (*where,)
        )
        joint.CreateAxisAttr(axis)
        joint.CreateLowerLimitAttr(limits_deg[0])
        joint.CreateUpperLimitAttr(limits_deg[1])
        robot.drive(joint, "angular", torque_n_m)
    robot.joint("FixedJoint", f"{calf}/{leg}_foot_joint", (calf, foot), (0, 0, -link_m))


if __name__ == "__main__":
    sys.stdout.write(f"{author(Path(sys.argv[1]))}\n")
