"""The table of schemes: parameters and six properties."""

from locant.analysis.properties import table


def test_properties_table():
    rows = {row.spec.split(":")[0]: row for row in table()}
    assert all(rows["tisa"].properties.values())
    assert not rows["learned"].properties["inductive"]
    assert not rows["learned"].properties["translation-invariant"]
    assert not rows["alibi"].properties["data-driven"]
    assert not rows["huang4"].properties["parameter-efficient"]
    assert not rows["rope"].properties["interpretable"]
    assert not rows["shaw"].properties["interpretable"]
    assert {name for name, row in rows.items() if row.reads} == {"inkling", "fox"}
    assert {name for name, row in rows.items() if row.causal_only} == {"fox", "grape"}
    readable = {name for name, row in rows.items() if row.properties["interpretable"]}
    assert "fade" in readable
    assert not readable & {"inkling", "fox", "grape", "pope", "logn", "fope", "dape"}
    assert (rows["learned"].shared, rows["learned"].own) == (393_216, 393_216)
    assert (rows["huang4"].shared, rows["huang4"].own) == (65_472, 12 * 65_472)
    small = {row.spec: row for row in table(length=128, layers=2, n_heads=2, d_model=64)}
    assert small["huang2:clip=127"].own == 2 * 2 * 255
