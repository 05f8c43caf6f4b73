"""The stubs are those of ``rpc.proto``: whoever edits it and forgets `make stubs` is told."""

import re
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from rallypoint.daemon import etcd
from rallypoint.daemon.etcd import rpc_pb2

Fields = dict[str, dict[str, tuple[int, bool, str]]]
SOURCE = Path(etcd.__path__[0]) / "rpc.proto"
FIELD = re.compile(r"(repeated )?([\w.]+) (\w+) = (\d+);")
TYPES = {
    name.removeprefix("TYPE_").lower(): number
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def written() -> Fields:
    """Field number, whether it repeats, and type, of each field of each message of the file."""
    found: Fields = {}
    nested: list[str] = []
    for line in SOURCE.read_text().splitlines():
        code = line.partition("//")[0].strip()
        if opened := re.fullmatch(r"(message|enum|oneof|service) (\w+) \{", code):
            nested.append(opened[2] if opened[1] == "message" else "")
            if opened[1] == "message":
                found[".".join(filter(None, nested))] = {}
        elif code == "}":
            nested.pop()
        elif field := FIELD.fullmatch(code):
            name = ".".join(filter(None, nested))
            found[name][field[3]] = (int(field[4]), bool(field[1]), field[2].rpartition(".")[2])
    return found


def compiled() -> Fields:
    """The same of the stubs."""

    def fields(message: Descriptor) -> dict[str, tuple[int, bool, str]]:
        return {f.name: (f.number, f.is_repeated, kind(f)) for f in message.fields}

    def kind(field: FieldDescriptor) -> str:
        named = field.message_type or field.enum_type
        if named is not None:
            return str(named.name)
        return next(name for name, number in TYPES.items() if number == field.type)

    package = rpc_pb2.DESCRIPTOR
    found = {name: fields(message) for name, message in package.message_types_by_name.items()}
    for name, message in package.message_types_by_name.items():
        found |= {f"{name}.{inner.name}": fields(inner) for inner in message.nested_types}
    return found


def test_every_message_and_field_is_the_one_that_is_written() -> None:
    assert rpc_pb2.DESCRIPTOR.package == "etcdserverpb"
    assert written() == compiled()
    assert len(written()) > 20
