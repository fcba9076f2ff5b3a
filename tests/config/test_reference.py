"""The table of all settings: each once, with the comment that stands in the code, and with whose default it is."""

from __future__ import annotations

import re

from opencda_marl.config_check import leaves, settings_of
from opencda_marl.config_reference import Row, markdown, rows
from opencda_marl.settings.learning import ALGORITHMS
from opencda_marl.settings.run import RunSettings


def _of(key: str, algorithm: str) -> Row:
    (row,) = [row for row in rows() if row.key == key and algorithm in row.algorithms]
    return row


def test_every_setting_of_every_algorithm_stands_there_once() -> None:
    for algorithm, cls in ALGORITHMS.items():
        found = [row.key for row in rows() if algorithm in row.algorithms]
        assert sorted(found) == sorted(f"learner.{key}" for key in settings_of(cls)), algorithm
    rest = [row.key for row in rows() if not row.algorithms]
    assert rest == [".".join(keys) for keys, _ in leaves(RunSettings)]
    assert all(row.about for row in rows())


def test_what_is_shared_is_one_row_with_each_default_and_its_owners() -> None:
    row = _of("learner.hidden", "mappo")
    assert row == _of("learner.hidden", "masac")
    assert row.about == "actor and critic"
    defaults = dict(re.findall(r"(\S.*?) \(([^)]*)\)(?:; |$)", row.default))
    assert {*defaults} == {"[128, 128]", "[256, 256]"}
    assert defaults["[128, 128]"] == "mappo, pcmappo"
    assert {"masac", "pcmasac"} <= {*defaults["[256, 256]"].split(", ")}
    assert _of("learner.update_mode", "masac").default == "eager"  # alike: no names
    assert _of("learner.learning_rate", "mappo").default == "0.001"
    assert _of("learner.learning_rate", "masac").default == "0.0003"


def test_learners_that_have_nothing_in_common_share_no_row() -> None:
    for row in rows():
        assert not {"mappo", "qlearning"} <= {*row.algorithms}, row


def test_the_page_has_one_table_a_class_and_no_heading_twice() -> None:
    text = markdown()
    block = text[text.index("### `learner`") : text.index("### `evaluation`")]
    headings = re.findall(r"^#### (.*)$", block, re.M)
    assert len(headings) == len({*headings}) >= 4
    assert headings[0] == "What every learner with networks has"
    assert {"MAPPO and PCMAPPO", "MASAC and PCMASAC", "What learners with a replay share"} <= {*headings}
    for title in re.findall(r"^(#+ .*)$", text, re.M):
        assert text.count(f"{title}\n") == 1, title
    assert block.count("| `learner.buffer_size` |") == 1
    assert block.count("| `learner.hidden` |") == 1
    assert "| `learner.ego` | a block of 'name: list of numbers' lines, -1000 to 1000 | `stop_line: [0.0," in block
    assert "| `learner.nearest` | a block of 'name: list of numbers' lines, -1000 to 1000 | `{}` |" in block
