"""Makes ``rpc_pb2.py`` and ``rpc_pb2.pyi`` of ``rpc.proto``: `make stubs`.

Needs the package ``grpcio-tools``, of the version below: what a compiler makes loads on its own
version of protobuf and on later ones, so an old one lets users have any protobuf from 5.29 on.
"""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

TOOLS: Final = "1.71.2"
"""Version of grpcio-tools, whose compiler is that of protobuf 5.29."""

_HEADER: Final = "# Made from rpc.proto by rallypoint.daemon.etcd.generate: not to be edited.\n"


def main() -> None:
    """Write the stubs beside ``rpc.proto``. Ends with a message when the compiler is not the one."""
    try:
        found = version("grpcio-tools")
    except PackageNotFoundError:
        found = "not installed"
    if found != TOOLS:
        sys.exit(
            f"grpcio-tools is {found}; pip install grpcio-tools=={TOOLS}, best in its own venv"
        )
    folder = Path(__file__).resolve().parent
    options = [f"-I{folder}", f"--python_out={folder}", f"--pyi_out={folder}"]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", *options, str(folder / "rpc.proto")], check=True
    )
    for path in (folder / "rpc_pb2.py", folder / "rpc_pb2.pyi"):
        path.write_text(_HEADER + path.read_text())


if __name__ == "__main__":
    main()
