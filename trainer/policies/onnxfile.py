"""A deployed policy as an ONNX file, and running one.

The graph is written here, operator by operator: a policy is a handful of layers, and both exporters of
torch need more than the format itself (one is deprecated, the other asks for a compiler stack).
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from rallypoint.trainer.policies.errors import MissingExtra
from rallypoint.trainer.policies.policy import DeployedPolicy

OPSET: Final = 17
IR_VERSION: Final = 8
"""Those of 2022: every runtime that is still in use reads them."""
INPUT: Final = "obs"
OUTPUT: Final = "action"


def encode(policy: DeployedPolicy, metadata: Mapping[str, str]) -> bytes:
    """The file: input ``obs`` ``[batch, D]``, output ``action`` ``[batch, A]``, both float32.
    Raises `MissingExtra` without the package ``onnx``."""
    onnx = _onnx()
    graph = _Graph(onnx)
    name = INPUT
    if policy.normalised:
        name = graph.add("Sub", name, graph.constant("mean", policy.mean))
        name = graph.add("Mul", name, graph.constant("inverse_scale", policy.inverse_scale))
    if policy.clip is not None:
        name = graph.bounded(name, policy.clip)
    for index, layer in enumerate(policy.layers):
        name = _layer(graph, index, layer, name)
    if policy.action_bound is not None:
        name = graph.bounded(name, policy.action_bound)
    graph.add("Identity", name, output=OUTPUT)
    return graph.model(policy, metadata)


def runner(data: bytes) -> tuple[Callable[[Tensor], Any], dict[str, str]]:
    """What the file computes (from ``[B, D]`` float32 to a numpy array ``[B, A]``), by onnxruntime, and
    its metadata. Raises `MissingExtra` without the package ``onnxruntime``."""
    try:
        import onnxruntime  # an extra
    except ImportError as error:
        raise MissingExtra("onnxruntime", "export") from error
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    metadata = dict(session.get_modelmeta().custom_metadata_map)
    return lambda obs: session.run([OUTPUT], {INPUT: obs.numpy()})[0], metadata


def _onnx() -> ModuleType:
    try:
        import onnx  # an extra
        import onnx.helper
        import onnx.numpy_helper
    except ImportError as error:
        raise MissingExtra("onnx", "export") from error
    module: ModuleType = onnx
    return module


class _Graph:
    """Nodes in a row, and the constants that they read."""

    def __init__(self, onnx: Any) -> None:
        self._onnx = onnx
        self._nodes: list[Any] = []
        self._constants: dict[str, Any] = {}

    def constant(self, name: str, value: Tensor) -> str:
        array = value.detach().float().contiguous().numpy()
        self._constants[name] = self._onnx.numpy_helper.from_array(array, name)
        return name

    def add(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Append an operator; the name of its output."""
        result = output or f"{kind.lower()}_{len(self._nodes)}"
        node = self._onnx.helper.make_node(kind, inputs, [result], name=result, **attributes)
        self._nodes.append(node)
        return result

    def bounded(self, name: str, bound: float) -> str:
        """``name`` clipped to ``bound`` on both sides of 0."""
        low = self.constant(f"low_{len(self._nodes)}", torch.tensor(-bound))
        high = self.constant(f"high_{len(self._nodes)}", torch.tensor(bound))
        return self.add("Clip", name, low, high)

    def model(self, policy: DeployedPolicy, metadata: Mapping[str, str]) -> bytes:
        helper, kind = self._onnx.helper, self._onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            self._nodes,
            "policy",
            [helper.make_tensor_value_info(INPUT, kind, ["batch", policy.inputs])],
            [helper.make_tensor_value_info(OUTPUT, kind, ["batch", policy.outputs])],
            initializer=list(self._constants.values()),
        )
        model = helper.make_model(
            graph, producer_name="rallypoint", opset_imports=[helper.make_opsetid("", OPSET)]
        )
        model.ir_version = IR_VERSION
        helper.set_model_props(model, dict(metadata))
        self._onnx.checker.check_model(model)
        data: bytes = model.SerializeToString()
        return data


def _layer(graph: _Graph, index: int, layer: nn.Module, name: str) -> str:
    if isinstance(layer, nn.Linear):
        weight = graph.constant(f"layers.{index}.weight", layer.weight)
        bias = graph.constant(f"layers.{index}.bias", layer.bias)
        return graph.add("Gemm", name, weight, bias, transB=1)
    if isinstance(layer, nn.SiLU):
        return graph.add("Mul", name, graph.add("Sigmoid", name))
    kinds = {nn.ELU: "Elu", nn.ReLU: "Relu", nn.Tanh: "Tanh"}
    return graph.add(kinds[type(layer)], name)
