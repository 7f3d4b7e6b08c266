"""Pickles that attack their reader, and the six kinds of checkpoints in which they may lie."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

import remesh
from remesh.errors import RemeshError
from remesh.formats import pickle_writer, table
from remesh.formats.pickle_records import Record
from remesh.formats.place import Place
from remesh.formats.restricted_pickle import KNOWN
from tests.fuzz.files import in_memory
from tests.fuzz.trees import EXTREME_INTS, ODD_TEXTS

# -- opcodes --------------------------------------------------------------------------------------


def name(full: str) -> bytes:
    module, _, attribute = full.rpartition(".")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def text(content: str) -> bytes:
    data = content.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def raw(data: bytes) -> bytes:
    return b"B" + len(data).to_bytes(4, "little") + data


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(data) + data


def items(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def call(function: bytes, *args: bytes) -> bytes:
    return function + items(*args) + b"R"


def mapping(*parts: bytes) -> bytes:
    return b"}(" + b"".join(parts) + b"u"


def storage_id(key: str = "0", kind: str = "torch.FloatStorage") -> bytes:
    return items(text("storage"), name(kind), text(key), text("cpu"), number(1)) + b"Q"


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> bytes:
    return call(
        name("torch._utils._rebuild_tensor_v2"),
        storage_id(),
        number(offset),
        items(*map(number, shape)),
        items(*map(number, strides)),
        b"\x89",
        call(name("collections.OrderedDict")),
    )


def doubled(levels: int, start: bytes = b"", pair: bytes = b"\x86") -> bytes:
    """A tuple of one tuple twice, and so on: exponentially many parts in few bytes."""
    made = start or text("x")
    for level in range(levels):
        made += b"q" + bytes([level]) + b"h" + bytes([level]) + pair
    return made


def doubled_lists(levels: int) -> bytes:
    made = text("x")
    for level in range(levels):
        made += b"q%c0](h%ch%ce" % (level, level, level)
    return made


# -- attacks --------------------------------------------------------------------------------------


def attacks(command: str) -> dict[str, bytes]:
    """Pickles, without their end, that would run a command or change the process."""
    layout = name("torch.serialization._get_layout")
    dotted = call(call(layout, text("torch._import_dotted_name")), text("os.system"))
    return {
        "os.system": call(name("os.system"), text(command)),
        "eval": call(name("builtins.eval"), text(f"__import__('os').system({command!r})")),
        "layout, dotted name": call(dotted, text(command)),
        "layout, torch.load": call(call(layout, text("torch.load")), text("/etc/passwd")),
        "layout, builtins": call(layout, text("torch.__builtins__"))
        + text("changed")
        + number(1)
        + b"s",
        "layout, module": call(layout, text("torch.os"))
        + mapping(text("changed"), number(1))
        + b"b",
        "load from bytes": call(name("torch.storage._load_from_bytes"), raw(pickle.dumps(print))),
        "reconstructor": call(
            name("copyreg._reconstructor"), name("os.system"), name("builtins.object"), b"N"
        ),
        "inst": b"(" + text(command) + b"ios\nsystem\n",
        "obj": b"(" + name("os.system") + text(command) + b"o",
        "new": name("os.system") + items(text(command)) + b"\x81",
        "new with names": name("os.system") + items(text(command)) + b"}\x92",
        "stack global": text("os") + text("path.os.system") + b"\x93" + items(text(command)) + b"R",
        "extension": b"\x82\x01",
        "state of a class": name("numpy.ndarray") + mapping(text("x"), number(1)) + b"b",
        "state of a constant": name("torch.float32") + mapping(text("x"), number(1)) + b"b",
        "from type": call(
            name("torch._tensor._rebuild_from_type_v2"),
            name("os.system"),
            name("torch.Tensor"),
            items(text(command)),
            b"N",
        ),
        "factory": call(name("collections.defaultdict"), name("os.system")),
        "numpy dtype": call(name("numpy.dtype"), text("f4,(2000000000,)O")),
        "objects": call(
            name("numpy._core.multiarray._reconstruct"),
            name("numpy.ndarray"),
            items(number(0)),
            raw(b"b"),
        )
        + items(
            number(1),
            items(number(1)),
            call(name("numpy.dtype"), text("O8"), b"\x89", b"\x88"),
            b"\x89",
            raw(b"\0" * 8),
        )
        + b"b",
    }


def burdens() -> dict[str, bytes]:
    """Pickles, without their end, that describe much more than they have bytes."""
    collide = 2**61 - 1
    return {
        "tuples": doubled(60),
        "a key": mapping(doubled(60), number(1)),
        "a set": b"\x8f(" + doubled(60) + b"\x90",
        "a frozen set": b"(" + doubled(60) + b"\x91",
        "a called set": call(name("builtins.set"), b"]" + doubled(60) + b"a"),
        "text of it": call(name("builtins.str"), doubled(60)),
        "lists": doubled_lists(60),
        "deep lists": b"]" * 20_000 + b"a" * 19_999,
        "deep tuples": b")" + b"\x85" * 20_000,
        "deep calls": call(name("collections.OrderedDict")) + b"\x85" * 20_000,
        "a list in itself": b"]q\x00h\x00a",
        "a tuple in itself": b"]q\x00h\x00\x85a",
        "a dict in itself": b"}q\x00" + text("a") + b"h\x00s",
        "a namespace in itself": call(name("argparse.Namespace"))
        + b"q\x00"
        + mapping(text("me"), b"h\x00")
        + b"b",
        "equal hashes": mapping(
            *(
                part
                for i in range(3000)
                for part in (b"\x8a\x10" + (i * collide).to_bytes(16, "little"), b"N")
            )
        ),
        "copies": b"]q\x00("
        + b"N" * 3000
        + b"e]("
        + call(name("builtins.list"), b"h\x00") * 3000
        + b"e",
        "long bytes": b"\x8e" + (1 << 60).to_bytes(8, "little"),
        "a long bytearray": b"\x96" + (1 << 40).to_bytes(8, "little"),
        "a long text": b"\x8d" + (1 << 62).to_bytes(8, "little"),
        "a long number": b"\x8b" + (2**31 - 1).to_bytes(4, "little"),
        "a negative length": b"\x8b" + (-5).to_bytes(4, "little", signed=True),
        "a long decimal": b"I" + b"9" * 100_000 + b"\n",
        "a large frame": b"\x95" + (1 << 63).to_bytes(8, "little"),
        "a far memo": b"Nr\xff\xff\xff\xff",
        "bytes by number": call(name("builtins.bytes"), number(1 << 40)),
        "a size": call(name("torch.Size"), items(number(1 << 62), number(1 << 62))),
        "an expanded tensor": mapping(text("t"), tensor((1 << 20,), (0,))),
        "an endless tensor": mapping(text("t"), tensor((10**12,), (0,))),
        "a tensor of overlaps": mapping(text("t"), tensor((1 << 18, 4), (1, 1))),
        "an opaque endless tensor": mapping(b"]" + tensor((1 << 20, 1 << 20), (0, 0)) + b"a", b"N"),
        "a tensor of many dims": mapping(text("t"), tensor((1,) * 1000, (1,) * 1000)),
        "long names": mapping(
            text("n" * 10_000),
            b"}(" + b"".join(text(str(i)) + b"N" for i in range(3000)) + b"u",
        ),
    }


# -- checkpoints ----------------------------------------------------------------------------------


def archive(pickled: bytes, storage: bytes = b"\x01" * 16) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as made:
        made.writestr("archive/data.pkl", pickled)
        made.writestr("archive/byteorder", "little")
        made.writestr("archive/version", "3\n")
        made.writestr("archive/data/0", storage)
    return stream.getvalue()


_DCP = "torch.distributed.checkpoint"


def new(kind: str, state: object = None) -> Record:
    return Record(kind, is_new=True, state=state)


def dcp_value(pickled: bytes, names: str = "v") -> dict[str, bytes]:
    """A checkpoint with one value, whose archive holds the pickle, under names of a letter each."""
    content = archive(pickled)
    place = {"relative_path": "__0_0.distcp", "offset": 0, "length": len(content)}
    state = {
        "state_dict_metadata": dict.fromkeys(names, new(f"{_DCP}.metadata.BytesStorageMetadata")),
        "planner_data": {name: (name,) for name in names},
        "storage_data": {
            new(
                f"{_DCP}.metadata.MetadataIndex", {"fqn": name, "offset": None, "index": None}
            ): new(f"{_DCP}.filesystem._StorageInfo", place)
            for name in names
        },
    }
    metadata = pickle_writer.dumps(new(f"{_DCP}.metadata.Metadata", state))
    return {".metadata": metadata, "__0_0.distcp": content}


def _paddle_data(pickled: bytes) -> dict[str, bytes]:
    """A checkpoint of one tensor, whose data file is the pickle."""
    home = "paddle.distributed.flex_checkpoint.dcp.metadata"
    box = {"global_offset": (0,), "local_shape": (4,), "dtype": "float32", "global_shape": (4,)}
    index = {"tensor_key": "w", "global_offset": (0,), "local_shape": (4,)}
    state = {
        "state_dict_metadata": {"w": [new(f"{home}.LocalTensorMetadata", box)]},
        "storage_metadata": {new(f"{home}.LocalTensorIndex", index): "0_0.distcp"},
        "flat_mapping": {"w": ("w",)},
    }
    return {
        "0.metadata": pickle_writer.dumps(new(f"{home}.Metadata", state)),
        "0_0.distcp": pickled,
    }


CHECKPOINTS: dict[str, Callable[[bytes], dict[str, bytes]]] = {
    "torch_file": lambda pickled: {"x.pt": archive(pickled)},
    "dcp_metadata": lambda pickled: {".metadata": pickled},
    "dcp_value": dcp_value,
    "megatron": lambda pickled: {**dcp_value(b"\x80\x02K\x01."), "common.pt": archive(pickled)},
    "zarr": lambda pickled: {
        "metadata.json": b'{"sharded_backend": "zarr"}',
        "common.pt": archive(pickled),
        "rng/shard_0_1.pt": archive(pickled),
    },
    "paddle_metadata": lambda pickled: {"0.metadata": pickled},
    "paddle_data": _paddle_data,
    "atorch": lambda pickled: {
        "optim_param.00000-00001": b"\x02\0\0\0\0\0\0\0{}",
        "optim_meta": pickled,
    },
}


def open_all(files: dict[str, bytes]) -> None:
    """Read a checkpoint as the format that it seems to be, and each archive in it alone."""
    storage = in_memory(files)
    places = [Place(storage, file=path) for path in files if path.endswith(".pt")]
    for place in (Place(storage), *places):
        try:
            table.read_contents(place)
        except RemeshError:
            continue


def warm_up() -> None:
    """Import what readers import when they are used for the first time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.pt")
        torch.save({"t": torch.ones(2), "dtype": torch.float32, "n": [1]}, path)
        checkpoint = remesh.Checkpoint(path)
        checkpoint.verify()
        checkpoint.state()
    benign = call(name("torch.Size"), items(number(1)))
    for kind in CHECKPOINTS.values():
        for files in (kind(b"\x80\x04" + benign + b"."), kind(b"\x80\x04}.")):
            open_all(files)


# -- fuzzing --------------------------------------------------------------------------------------

OPCODES = sorted(op.code.encode("latin1") for op in pickletools.opcodes if op.name != "STOP")
_NAMES = sorted(KNOWN)
_BAD_NAMES = ["os.system", "builtins.eval", "builtins.getattr", "torch.load", "sys.modules"]


def any_name(dice: random.Random) -> bytes:
    """A name that the reader knows, or one that it must not."""
    return name(dice.choice(_NAMES if dice.random() < 0.8 else _BAD_NAMES))


def piece(dice: random.Random, depth: int) -> bytes:
    """Opcodes that leave one thing on the stack, or any opcode."""
    inner = [piece(dice, depth - 1) for _ in range(dice.randint(0, 3))] if depth > 0 else []
    options: list[Callable[[], bytes]] = [
        lambda: dice.choice([b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f"]),
        lambda: number(dice.choice(EXTREME_INTS)),
        lambda: text(dice.choice(ODD_TEXTS)),
        lambda: raw(dice.randbytes(dice.choice([0, 1, 4, 8]))),
        lambda: any_name(dice),
        lambda: b"G" + dice.randbytes(8),
        lambda: b"q%c" % dice.randrange(4) + b"h%c" % dice.randrange(4),
        storage_id,
        lambda: tensor(
            tuple(dice.choice([0, 1, 2, 2**20]) for _ in range(dice.randint(0, 3))),
            tuple(dice.choice([0, 1, 2]) for _ in range(dice.randint(0, 3))),
        ),
        lambda: dice.choice(OPCODES) + dice.randbytes(dice.choice([0, 0, 1, 4])),
    ]
    nested: list[Callable[[], bytes]] = [
        lambda: items(*inner),
        lambda: b"](" + b"".join(inner) + b"e",
        lambda: b"(" + b"".join(inner) + b"\x91",
        lambda: mapping(*inner, *inner),
        lambda: b"\x8f(" + b"".join(inner) + b"\x90",
        lambda: call(name(dice.choice(_NAMES)), *inner),
        lambda: call(name(dice.choice(_NAMES)), *inner) + piece(dice, depth - 1) + b"b",
        lambda: (
            name(dice.choice(_NAMES)) + items(*inner) + b"\x81" + mapping(*inner, *inner) + b"b"
        ),
        lambda: items(*inner) + b"Q",
        lambda: doubled(dice.randint(1, 70), b"".join(inner[:1])),
    ]
    return dice.choice(options if depth <= 0 or dice.random() < 0.3 else nested)()
