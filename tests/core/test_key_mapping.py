"""Which name of a checkpoint's is which of the model's."""

from __future__ import annotations

import pytest

from lightning_elastic_zero.core.names import (
    MOST_SUGGESTED,
    KeyMapping,
    guess_key_mapping,
    mapping_to,
)
from lightning_elastic_zero.core.options import check_rename
from lightning_elastic_zero.errors import CheckpointMismatchError


@pytest.mark.parametrize(
    ("of", "saved", "here"),
    [
        ({"enc": "back.enc"}, "enc.0.weight", "back.enc.0.weight"),
        ({"enc.": "back.enc."}, "enc.0.weight", "back.enc.0.weight"),
        ({"enc": "back.enc"}, "encoder.weight", "encoder.weight"),
        ({"": "model"}, "a.weight", "model.a.weight"),
        ({"model": ""}, "model.a.weight", "a.weight"),
        ({"": "model", "a": "b"}, "a.weight", "b.weight"),
        ({"a": "b", "a.q": "c"}, "a.q.weight", "c.weight"),
        ({"a": "b", "b": "a"}, "b.weight", "a.weight"),
        ({"one": "two"}, "one", "two"),
        ({"model.*": "*"}, "model.a.weight", "a.weight"),
        ({"*.gamma": "*.weight"}, "a.norm.gamma", "a.norm.weight"),
        (
            {"layers.*.attn.*": "blocks.*.attention.*"},
            "layers.3.attn.q.w",
            "blocks.3.attention.q.w",
        ),
        ({"layers.*": "blocks.*"}, "my.layers.3", "my.layers.3"),
        ({"*.0.*": "*-*"}, "a.0.b.0.c", "a-b.0.c"),
        ({"a*": "b*", "a": "c"}, "ab.w", "bb.w"),
        ({"a.*": "c.*", "a.q": "d"}, "a.q.w", "d.w"),
        ({"a.q": "d", "a.*.w": "c.*.w"}, "a.q.w", "c.q.w"),
        ({"a[0].*": "a.*"}, "a[0].w", "a.w"),
        ({}, "one", "one"),
    ],
)
def test_beginnings(of: dict[str, str], saved: str, here: str) -> None:
    """Whole names between dots, or patterns; the longest one that fits counts."""
    assert KeyMapping(of).here(saved) == here


@pytest.mark.parametrize(
    ("of", "live", "saved", "here"),
    [
        ({}, "net.a.w", "_orig_mod.net.a.w", "net.a.w"),
        ({}, "_orig_mod.net.a.w", "net.a.w", "_orig_mod.net.a.w"),
        ({}, "net._orig_mod.a.w", "net.a._checkpoint_wrapped_module.w", "net._orig_mod.a.w"),
        ({}, "net.a.w", "net.b.w", "net.b.w"),
        ({"enc": "back"}, "back._orig_mod.w", "enc._orig_mod.w", "back._orig_mod.w"),
        ({"net.enc": "back"}, "back.w", "net._orig_mod.enc.w", "back.w"),
        ({"net._orig_mod": "net"}, "net.w", "net._orig_mod.w", "net.w"),
    ],
)
def test_compiled_layers_are_the_same(of: dict[str, str], live: str, saved: str, here: str) -> None:
    """Names differ by what wrappers put into them, on either side, and beside what is renamed."""
    assert mapping_to([live, "other"], of).here(saved) == here
    assert mapping_to([live, "other"], of).table([saved], "a.ckpt") == {saved: here}


def test_a_layer_beside_its_compiled_self() -> None:
    """Where both are in the model, each keeps its name."""
    both = ("net.w", "net._orig_mod.w")
    assert mapping_to(both, {}).table(both, "a.ckpt") == dict(zip(both, both, strict=True))


@pytest.mark.parametrize(
    ("of", "says"),
    [
        ({"c": "d"}, r"rename='c' matches no name in the checkpoint"),
        ({"a": "b"}, "maps both 'a.x' and 'b.x' to 'b.x'"),
        ({"*.y": "*.z"}, r"rename='\*\.y' matches no name"),
        ({"*.x": "y*"}, None),
        ({"*.*": "*"}, "both sides need the same number of"),
        ({"a.x": ""}, "turns 'a.x' into an empty name"),
        ({"?*": "*"}, "matches no name"),
        ({"b*": "a*"}, "maps both 'a.x' and 'b.x' to 'a.x'"),
    ],
)
def test_what_cannot_be(of: dict[str, str], says: str | None) -> None:
    """What fits no name, two names that would be one, and a name of nothing, are refused."""
    if says is None:
        assert KeyMapping(of).table(["a.x", "b.x"], "") == {"a.x": "ya", "b.x": "yb"}
        return
    with pytest.raises(CheckpointMismatchError, match=says):
        KeyMapping(of).table(["a.x", "b.x"], "last.ckpt")


@pytest.mark.parametrize("value", [["a"], "a", {"a": 1}, {1: "a"}, True])
def test_what_is_no_renaming(value: object) -> None:
    """It is refused where it is passed."""
    with pytest.raises(ValueError, match=r"^rename=.*: it must be a dictionary of names"):
        check_rename(value)
    assert check_rename(None) == {}


@pytest.mark.parametrize(
    ("unexpected", "missing", "expected"),
    [
        ({"m.a.w": 1, "m.b": 2}, {"a.w": 1, "b": 2}, {"m": ""}),
        ({"a.w": 1, "b": 2}, {"m.a.w": 1, "m.b": 2}, {"": "m"}),
        ({"q.w": 1}, {"q.base.w": 1, "q.lora.w": 2}, {"q": "q.base"}),
        ({"b.w": 1, "b.bias": 2}, {"c.w": 1, "c.bias": 2}, {"b": "c"}),
        ({"head.w": 1}, {"top.w": 2}, {}),
        ({"old.w": 1}, {}, {}),
    ],
)
def test_what_is_likely(
    unexpected: dict[str, int], missing: dict[str, int], expected: dict[str, str]
) -> None:
    """One change of a beginning that leads from names of one side to names of the other."""
    assert guess_key_mapping(unexpected, missing) == expected


def test_what_fits_is_not_renamed() -> None:
    """Only as much of a name is renamed as no name has that both sides have."""
    assert guess_key_mapping(
        {"enc.w": 1, "enc.b": 2}, {"m.enc.w": 1, "m.enc.b": 2}, ["head.w", "head.b"]
    ) == {"enc": "m.enc"}
    assert guess_key_mapping({"a.w": 1}, {"b.w": 1}, ["a.v"]) == {"a.w": "b.w"}


def test_of_many_the_first_are_suggested() -> None:
    """An error shows what to do; it does not do it."""
    found = guess_key_mapping(
        {f"l{i}.w": 1 for i in range(999)}, {f"k{i}.w": 1 for i in range(999)}
    )
    assert found == {f"l{i}": f"k{i}" for i in range(MOST_SUGGESTED)}
