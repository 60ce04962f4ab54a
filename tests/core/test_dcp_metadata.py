"""What a directory of chunks says of itself is read as it was written, and changes nothing else."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import pytest
from torch.distributed.checkpoint import metadata

from lightning_elastic_zero.errors import CheckpointCorruptedError, UnsupportedError
from lightning_elastic_zero.formats.dcp_read import read_metadata
from tests.core._fuzz_metadata import MEMBERS, sound

MODULE = b"ctorch.distributed.checkpoint.metadata\n"


def _read(data: bytes, folder: Path) -> metadata.Metadata:
    (folder / ".metadata").write_bytes(data)
    return read_metadata(folder)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_was_written_is_read(protocol: int, tmp_path: Path) -> None:
    """Every field comes back, in each protocol; where it was saved stays a path."""
    wanted = sound(3)
    found = _read(pickle.dumps(wanted, protocol), tmp_path)
    assert found.storage_meta is not None
    assert str(found.storage_meta.checkpoint_id) == "/saved/here"
    found.storage_meta = wanted.storage_meta
    assert found == wanted


def test_members_of_an_enumeration_belong_to_everybody(tmp_path: Path) -> None:
    """A state is given to instances that the pickle made: a member is this process's own."""
    member = MODULE + b"_MEM_FORMAT_ENCODING\nK\x00\x85R"
    changes = pickle.EMPTY_DICT + b"X\x07\x00\x00\x00_value_K\x07s" + pickle.BUILD
    with pytest.raises(UnsupportedError, match="a pickle that changes <_MEM_FORMAT_ENCODING"):
        _read(b"\x80\x02" + member + changes + pickle.STOP, tmp_path)
    assert [one.value for one in MEMBERS] == [0, 1, 2]


def _pairs(depth: int) -> bytes:
    """Make a tuple of which hashing takes two to the depth."""
    return b"K\x01" + (pickle.DUP + pickle.TUPLE2) * depth


_INDEX = MODULE + b"MetadataIndex\n)\x81"
_NAMED = pickle.EMPTY_DICT + b"X\x03\x00\x00\x00fqn%s" + b"s" + pickle.BUILD


@pytest.mark.parametrize(
    ("opcodes", "reason"),
    [
        (pickle.EMPTY_DICT + _pairs(90) + b"K\x01s", "a key nested too deep"),
        (
            pickle.EMPTY_DICT + _INDEX + _NAMED % _pairs(90) + b"K\x01s",
            "a key nested too deep",
        ),
        (_INDEX + _NAMED % b"K\x01" + _NAMED % b"K\x02", "a second state of one object"),
        (MODULE + b"Metadata\nK\x01\x85R", "that it does not take"),
        (MODULE + b"Metadata\n)\x81K\x01K\x02s", "a Metadata that is filled"),
        (pickle.BYTEARRAY8 + struct.pack("<Q", 1 << 40) + b"x", "fewer bytes than it says"),
    ],
)
def test_what_no_metadata_is_made_of_is_refused(
    opcodes: bytes, reason: str, tmp_path: Path
) -> None:
    """Time, memory and classes of this process are not the file's to take."""
    with pytest.raises(CheckpointCorruptedError, match=reason):
        _read(b"\x80\x05" + opcodes + pickle.STOP, tmp_path)
