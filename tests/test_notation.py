"""The syntax of spec strings."""

import pytest

from locant import notation


def test_a_sum_is_parsed_into_names_and_options():
    assert notation.parse("Tisa: kernels = 5 +learned:length=512") == [
        notation.Part("tisa", {"kernels": "5"}),
        notation.Part("learned", {"length": "512"}),
    ]
    assert notation.parse("rope:theta=1e+5") == [notation.Part("rope", {"theta": "1e+5"})]


def test_a_comma_before_an_option_belongs_to_its_scheme():
    assert notation.split("tisa, huang4:clip=64,heads=own,nope,native+tisa:kernels=5") == [
        "tisa", "huang4:clip=64,heads=own", "nope", "native+tisa:kernels=5",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="'tisa,,nope' has an empty place between two commas"):
        notation.split("tisa,,nope")


def test_unknown_names_are_rejected():
    parts = notation.parse("zzz+tisa")
    notation.check_names(parts, ["zzz", "tisa"])
    with pytest.raises(ValueError, match="unknown scheme 'zzz'; known schemes: nope, learned"):
        notation.check_names(parts)


def test_a_spec_is_a_string():
    with pytest.raises(TypeError, match="a spec is a string such as 'tisa:kernels=5', got int: 5"):
        notation.parse(5)


def test_maps_follow_a_scheme():
    assert notation.parse("tisa:kernels=5 @ SelfExtend: window=8, size = 4@grouped +rope@interpolated:factor=1e+1") == [
        notation.Part("tisa", {"kernels": "5"}, (
            notation.Part("selfextend", {"window": "8", "size": "4"}), notation.Part("grouped", {}),
        )),
        notation.Part("rope", {}, (notation.Part("interpolated", {"factor": "1e+1"}),)),
    ]  # fmt: skip
    assert notation.split("tisa:kernels=5@selfextend:window=8,size=4,nope,rope@grouped") == [
        "tisa:kernels=5@selfextend:window=8,size=4", "nope", "rope@grouped",
    ]  # fmt: skip
    assert notation.layers("rope@grouped:size=2/nope") == ["rope@grouped:size=2", "nope"]
    assert notation.names("rope@grouped+tisa@selfextend@grouped") == {"rope", "grouped", "tisa", "selfextend"}
    with pytest.raises(ValueError, match="unknown map 'x'; known maps: a, b"):
        notation.check_names(notation.parse("rope@x"), ["rope"], ["a", "b"])
