"""Completions that fork on the page: what they share once, and the rest beneath."""

from tests.web.report.fake_runs import call, completion, group, turn
from tiercel.runs.records import GroupRecord, GroupTokens
from tiercel.web.report.pictures import Album
from tiercel.web.report.rollouts import group_card
from tiercel.web.report.templates import environment


def made(text: str, ids: list[int], forks: list[int], reward: float, **more) -> dict:
    found = completion(text, {"exact": reward}, reward > 0, **more)
    return found | {"token_ids": ids, "forks": forks, "tokens": len(ids)}


FORKED = [
    made("A red dog", [1, 2, 3], [1], 0.0),
    made("A blue dog", [1, 4, 3], [1], 1.0),
    made("No", [5], [1], 0.0),
    made("No", [5], [1], 0.0),
]


def record(completions: list[dict]) -> GroupRecord:
    return GroupRecord.from_json(group("a", "?", "7", [], completions))


def drawn(folder, card) -> str:
    return str(environment().get_template("cards.html").module.group_card(Album(folder), card))


def test_a_shared_part_stands_above_what_follows_it():
    rows = group_card(record(FORKED)).rows
    assert [(row.depth, row.completion.text, row.is_empty) for row in rows] == [
        (0, "A ", False),
        (1, "red dog", False),
        (1, "blue dog", False),
        (0, "No", False),
        (1, "", True),
        (1, "", True),
    ]
    assert [row.said for row in rows if row.said] == [
        "2 completions from here, mean reward 0.500",
        "2 completions from here, mean reward 0",
    ]
    assert [row.number for row in rows if not row.said] == [1, 2, 3, 4]


def test_completions_without_forks_are_ranked_and_whole():
    rows = group_card(record([each | {"forks": []} for each in FORKED])).rows
    assert [(row.depth, row.number, row.completion.text) for row in rows] == [
        (0, 2, "A blue dog"),
        (0, 1, "A red dog"),
        (0, 3, "No"),
        (0, 4, "No"),
    ]


def test_a_tree_of_two_levels():
    completions = [
        made(text, ids, [1, 2], 1.0)
        for text, ids in (("abc", [1, 2, 3]), ("abd", [1, 2, 4]), ("axe", [1, 5, 6]), ("axf", [1, 5, 7]))
    ]
    rows = group_card(record(completions)).rows
    assert [(row.depth, row.completion.text) for row in rows] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
        (2, "d"),
        (1, "x"),
        (2, "e"),
        (2, "f"),
    ]


def test_tokens_are_cut_where_the_completion_forks():
    texts = (["A ", "red ", "dog"], ["A ", "blue ", "dog"], ["No"], ["No"])
    known = [{"texts": each, "logprobs": [-0.5] * len(each), "entropies": None, "gaps": None} for each in texts]
    found = record(FORKED)
    rows = group_card(found, GroupTokens.from_json({"index": found.index, "completions": known})).rows
    assert [row.record.texts for row in rows] == [
        ("A ",),
        ("red ", "dog"),
        ("blue ", "dog"),
        ("No",),
        (),
        (),
    ]


def test_turns_after_a_fork_keep_their_numbers(tmp_path):
    first = turn("Look.", [call("zoom")], "left") | {"start": 0, "stop": 2}
    second = [turn(text) | {"start": 3, "stop": 5} for text in ("Seven.", "Eight.")]
    completions = [
        made(each["text"], [1, 2, 9, 3, number], [3], 1.0, turns=[first, each]) for number, each in enumerate(second)
    ]
    card = group_card(record(completions))
    assert [row.turns for row in card.rows] == [range(0, 1), range(1, 2), range(1, 2)]
    page = drawn(tmp_path, card)
    assert page.count("Look.") == page.count("Seven.") == page.count("Eight.") == 1
    assert page.count('<div class="branch">') == 2 and page.count('<li value="2">') == 2


def test_the_page_says_where_a_completion_ended_with_the_shared_part(tmp_path):
    page = drawn(tmp_path, group_card(record(FORKED)))
    assert page.count("ended with the part above") == 2 and page.count("A ") >= 1
    assert page.index("red dog") < page.index("blue dog")
