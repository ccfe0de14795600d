"""The table of twins gives each test to its model."""

import pytest

from tests.twin_table import Row, Table, main


@pytest.mark.parametrize(
    ("test", "name"),
    [
        ("tests/hybrid/test_kimi_linear_twin.py::test_forward_equals_the_twin[kimi_linear]", "kimi_linear"),
        ("tests/test_laws.py::test_law[3-gemma3_text-native]", "gemma3_text"),
        ("tests/test_laws.py::test_law[10-composed latent-torch]", "composed"),
        ("tests/test_laws.py::test_law[1-falcon_mamba-torch]", "falcon_mamba"),
    ],
)
def test_a_test_is_its_model_s(test: str, name: str) -> None:
    table = Table()
    assert table.row_of(test) is table.rows[name]


def test_a_row_shows_what_was_lost() -> None:
    row = Row(differences=[1e-6, 3e-5], moves=[0.2, 0.004], points=[True, False], laws=[True] * 3)
    assert row.line("jamba").split() == ["jamba", "3.0e-05", "1/2", "4.0e-03", "3/3"]


def test_another_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qwen4_next"]) == 2
    assert "qwen4_next: known are qwen3_next" in capsys.readouterr().err
