"""Trajectories with environments of the forms that TRL documents: a text game, tools, pictures, async methods."""

import json

import pytest
import torch

from tiercel.data.media.images import decode
from tiercel.environments import setting
from tiercel.models.rendering import token_ids
from tiercel.reward_types import PolicyTurn, RewardValue, SampleImage, ToolCall

pytestmark = pytest.mark.usefixtures("no_child_left")

GAME = """
    class Guess:
        def __init__(self):
            self.games = 0

        def reset(self, answer, **row):
            self.secret, self.left, self.reward, self.done = answer, 2, 0.0, False
            self.games += 1
            return f" You have {self.left} tries."

        def guess(self, number: int) -> str:
            '''Guess the secret number.

            Args:
                number: The guess.
            '''
            if self.done:
                raise ValueError("The game is over.")
            self.left -= 1
            self.reward = float(number == self.secret)
            self.done = self.left == 0 or number == self.secret
            return "right" if number == self.secret else "higher" if number < self.secret else "lower"

        def get_reward(self):
            return self.reward
    """


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def text_of(family, observation):
    return family.tokenizer.decode(observation.token_ids_L)


def play(dialogue, *texts):
    """Replies to turns, up to the end."""
    replies = []
    for text in texts:
        replies.append(dialogue.answer(text, 5).result())
        if replies[-1].observation is None:
            break
    return replies


def test_a_text_game_with_state(write, opened, prompt, tool_family):
    with opened(f"{write(GAME)}:Guess", tools=("guess",), gives_reward=True) as dialogues:
        (begun,) = dialogues.prompts_of([prompt])
        assert begun.messages[-1].content == "<image>Where is the seven? You have 2 tries."
        assert begun.row is prompt.row and len(begun.token_ids_P) > len(prompt.token_ids_P)
        right, wrong = dialogues.open(begun, [0, 1])
        first, second = play(right, "Hm. " + call("guess", number=3), call("guess", number=7))
        assert first.turn == PolicyTurn(
            text="Hm. " + call("guess", number=3),
            token_count=5,
            calls=(ToolCall(name="guess", arguments={"number": 3}),),
            answer="higher",
        )
        assert text_of(tool_family, first.observation) == (
            "<|im_end|>\n<|im_start|>user\n<tool_response>higher</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
        assert second.observation is None and second.turn.answer == "right"  # the environment is done
        assert right.end().outcome == RewardValue(value=1.0)
        (last,) = play(wrong, "".join(call("guess", number=number) for number in (8, 9, 7)))
        assert last.turn.answer == "lower\nlower" and len(last.turn.calls) == 2  # it was done before the third
        assert (wrong.end().outcome, wrong.end().failure) == (RewardValue(value=0.0), None)


def test_a_turn_without_calls_ends_the_trajectory(write, opened, prompt):
    with opened(f"{write(GAME)}:Guess", tools=("guess",), gives_reward=True) as dialogues:
        (begun,) = dialogues.prompts_of([prompt])
        (dialogue,) = dialogues.open(begun, [0])
        (reply,) = play(dialogue, "It is 7.")
        assert reply.turn == PolicyTurn(text="It is 7.", token_count=5) and reply.observation is None
        assert dialogue.end().outcome == RewardValue(value=0.0)


def test_a_process_is_used_again_after_reset(write, opened, prompt):
    source = write("""
        import os

        class Env:
            count = 0

            def reset(self, **row):
                self.count += 1

            def who(self) -> str:
                return f"{os.getpid()} {self.count}"
        """)
    with opened(f"{source}:Env", tools=("who",)) as dialogues:
        seen = []
        for _ in range(2):
            (dialogue,) = dialogues.open(prompt, [0])
            seen.append(play(dialogue, call("who"))[0].turn.answer.split())
            dialogue.end()
    (pid, _), (other, _) = seen
    assert pid == other and [count for _, count in seen] == ["1", "2"]


def test_tools_without_an_environment_sync_and_async(write, opened, prompt):
    source = write("""
        import asyncio

        def double(x: int) -> int:
            return 2 * x

        async def later(x: int) -> dict:
            await asyncio.sleep(0.01)
            return {"x": x}
        """)
    with opened(None, f"{source}:double", f"{source}:later", tools=("double", "later")) as dialogues:
        assert dialogues.prompts_of([prompt]) == [prompt]
        (dialogue,) = dialogues.open(prompt, [0])
        (reply,) = play(dialogue, call("double", x=3) + call("later", x=4))
        assert reply.turn.answer == "6\n{'x': 4}" and len(reply.turn.calls) == 2
        ending = dialogue.end()
        assert (ending.outcome, ending.failure) == (None, None)


ASYNC = """
    import asyncio

    class Env:
        async def reset(self, **row):
            await asyncio.sleep(0)
            self.level = row["level"]
            return [{"type": "text", "text": " Look: "}, {"type": "image", "image": self.picture()}]

        def picture(self):
            from PIL import Image
            return Image.new("RGB", (84, 56), (self.level, 0, 0))

        async def look(self, times: int = 1):
            return [{"type": "image", "image": self.picture()}] * times + [{"type": "text", "text": "seen"}]

        async def get_reward(self):
            return None
    """


def test_pictures_come_back_from_reset_and_from_tools(write, opened, prompt, tool_family):
    with opened(f"{write(ASYNC)}:Env", tools=("look", "crop"), gives_reward=True) as dialogues:
        (begun,) = dialogues.prompts_of([prompt])
        assert begun.messages[-1].content == "<image>Where is the seven? Look: <image>"
        assert [image.plan.original_size for image in begun.images] == [(112, 56), (84, 56)]
        assert begun.images[1].views[0][0, 0].tolist() == [2, 0, 0]
        (dialogue,) = dialogues.open(begun, [0])
        looked, cropped = play(dialogue, call("look", times=2), call("crop", box=[0, 0, 28, 28], image=4))
        assert looked.turn.answer == "<image><image>seen"
        assert looked.turn.images == (SampleImage(path=None, original_size=(84, 56), processed_size=(84, 56)),) * 2
        assert [image.sha256 for image in looked.observation.images] == [begun.images[1].sha256] * 2
        placeholders = tool_family.is_placeholder(looked.observation.token_ids_L)
        assert int(placeholders.sum()) == 2 * tool_family.feature_count(begun.images[1].plan)
        assert cropped.turn.answer == "image 5\n<image>"
        assert dialogue.end().outcome == RewardValue(value=None)


def test_trajectories_of_a_group_share_what_is_decoded(write, opened, prompt, monkeypatch):
    decoded = []
    monkeypatch.setattr(setting, "decode", lambda source, *more: decoded.append(source) or decode(source, *more))
    source = """
        from PIL import Image

        class Show:
            def reset(self, **row):
                return [{"type": "image", "image": Image.new("RGB", (40, 30), (9, 90, 200))}]
        """
    with opened(f"{write(source)}:Show", tools=("zoom",)) as dialogues:
        (begun,) = dialogues.prompts_of([prompt])
        assert len(begun.images) == 2
        for dialogue in dialogues.open(begun, [0, 1, 2]):
            (reply,) = play(dialogue, call("zoom", box=[0, 0, 28, 28]) + call("zoom", box=[0, 0, 9, 9], image=2))
            assert [made.failure for made in reply.turn.calls] == [None, None]
            dialogue.end()
    assert len(decoded) == len(set(decoded)) == 2


def test_zoom_shows_the_original_in_the_models_coordinates(opened, prompt, tool_family):
    with opened(tools=("zoom",)) as dialogues:
        (dialogue,) = dialogues.open(prompt, [0])
        (reply,) = play(dialogue, call("zoom", box=[0, 0, 28, 28], label="the seven"))
        assert reply.turn.answer == "image 2: the seven\n<image>"
        assert reply.turn.images[0].original_size == (56, 56)  # as high as the picture was shown
        assert reply.observation.images[0].plan.processed_size == (56, 56)


def test_what_is_no_call_of_a_tool_is_answered_and_counted(write, opened, prompt):
    source = write("""
        def fail(x: int) -> int:
            raise ValueError("x is odd")
        """)
    texts = {
        "<tool_call>{]</tool_call>": ("", "the tool call cannot be read: Expecting property name"),
        call("fly"): ("fly", "there is no tool 'fly'; the tools are fail, zoom"),
        call("fail", x=1): ("fail", "x is odd"),
        call("fail", y=1): ("fail", "missing a required argument: 'x'"),
        call("zoom", box=[0, 0, 500, 28]): ("zoom", "[0.0, 0.0, 500.0, 28.0] is not inside image 1"),
        call("zoom", box=[0, 0, 28]): ("zoom", "box: List should have at least 4 items"),
        call("zoom", box=[0, 0, 28, 28], image=2): ("zoom", "there is no image 2; there are 1"),
    }
    with opened(None, f"{source}:fail", tools=("fail", "zoom")) as dialogues:
        (dialogue,) = dialogues.open(prompt, [0])
        for text, (name, failure) in texts.items():
            (reply,) = play(dialogue, text)
            (made,) = reply.turn.calls
            assert made.name == name and made.failure.startswith(failure)
            assert made.is_known == (name in ("fail", "zoom"))
            assert reply.turn.answer == f"error: {made.failure}" and reply.observation is not None
        assert dialogue.end().failure is None


def test_a_dialogue_without_tools(write, opened, prompt, tool_family):
    source = write("""
        class Teacher:
            def reset(self, **row):
                self.turns = 0

            def respond(self, completion):
                self.turns += 1
                return None if "7" in completion else f"Not {completion}. Again?"
        """)
    with opened(f"{source}:Teacher", responds=True) as dialogues:
        (dialogue,) = dialogues.open(prompt, [0])
        first, last = play(dialogue, "5", "7")
        assert first.turn.answer == "Not 5. Again?" and first.turn.calls == ()
        assert text_of(tool_family, first.observation) == (
            "<|im_end|>\n<|im_start|>user\nNot 5. Again?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert last.observation is None and last.turn.answer is None
        dialogue.end()


def test_reset_gets_the_row_and_a_seed_of_its_own(write, opened, prompt):
    source = write("""
        class Env:
            def reset(self, seed, **row):
                self.seen = sorted(row.items(), key=str), seed

            def told(self) -> str:
                return repr(self.seen)
        """)

    def seeds(run_seed):
        with opened(f"{source}:Env", tools=("told",), seed=run_seed) as dialogues:
            begun = dialogues.open(prompt, [0, 1, 2])
            told = [play(dialogue, call("told"))[0].turn.answer for dialogue in begun]
        rows, seeds = zip(*(each.rsplit(", ", 1) for each in told), strict=True)
        assert len(set(rows)) == 1
        for field in ("('id', 'row-1')", "('answer', 7)", "('level', 2)", "('images', [None])", "< image>Where is"):
            assert field in rows[0]
        return [int(each[:-1]) for each in seeds]

    first = seeds(0)
    assert first == seeds(0) and first == [first[0], first[0] + 1, first[0] + 2]
    assert seeds(1)[0] not in first


def test_two_runs_of_a_seeded_environment_are_the_same(write, opened, prompt):
    source = write("""
        import random
        import time

        class Env:
            def reset(self, seed, **row):
                self.random = random.Random(seed)

            def roll(self) -> int:
                time.sleep(random.random() / 20)
                return self.random.randrange(10**6)
        """)

    def run():
        with opened(f"{source}:Env", tools=("roll",)) as dialogues:
            begun = dialogues.open(prompt, range(4))
            for _ in range(2):  # all at the same time
                replies = [dialogue.answer(call("roll"), 5) for dialogue in begun]
                yield from (reply.result() for reply in replies)
            for dialogue in begun:
                dialogue.end()

    first, second = list(run()), list(run())
    assert [reply.turn for reply in first] == [reply.turn for reply in second]
    assert len({reply.turn.answer for reply in first}) == 8
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.observation.token_ids_L, other.observation.token_ids_L)


@pytest.mark.parametrize("answer", ["f'Seed {seed}.'", "Image.new('RGB', (56, 56), (seed % 256, 0, 0))"])
def test_a_reset_that_answers_each_sample_otherwise_fails(write, opened, prompt, answer):
    source = write(f"""
        from PIL import Image

        class Env:
            def reset(self, seed, **row):
                return {answer}
        """)
    with opened(f"{source}:Env") as dialogues:
        (begun,) = dialogues.prompts_of([prompt])
        same, other = (dialogue.end() for dialogue in dialogues.open(begun, [0, 1]))
    assert same.failure is None
    assert "the same for each of its samples" in other.failure and "row row-1" in other.failure


def test_a_reset_that_fails_once_fails_no_sample(write, opened, prompt, tmp_path):
    source = write(f"""
        from pathlib import Path

        class Env:
            def reset(self, **row):
                mark = Path({str(tmp_path / "asked")!r})
                if not mark.exists():
                    mark.touch()
                    raise OSError("busy")
                return "Begin."
        """)
    with opened(f"{source}:Env") as dialogues:
        (begun,) = dialogues.prompts_of([prompt])
        (dialogue,) = dialogues.open(begun, [0])
        assert begun is not prompt and dialogue.end().failure is None


def test_a_reset_that_is_too_long_for_a_prompt_fails_its_samples_with_the_reason(write, opened, prompt):
    source = write("""
        class Env:
            def reset(self, **row):
                return "x" * 5000
        """)
    with opened(f"{source}:Env") as dialogues:
        (begun,) = dialogues.prompts_of([prompt])
        (dialogue,) = dialogues.open(begun, [0])
        assert begun is prompt and "more than data.max_prompt_tokens" in dialogue.end().failure


@pytest.mark.parametrize("text", ["<image>", "<|im_end|>", "a<|vision_start|><|image_pad|>b", "<bbox>", "\\ud800"])
def test_answers_cannot_smuggle_placeholders_or_ends(write, opened, prompt, tool_family, text):
    source = write(f"""
        class Env:
            def reset(self, **row):
                return "{text}"

            def say(self):
                middle = len("{text}") // 2
                return [{{"type": "text", "text": part}} for part in ("{text}"[:middle], "{text}"[middle:])]

            def fail(self):
                raise ValueError("{text}")
        """)
    tokenizer = tool_family.tokenizer
    special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    with opened(f"{source}:Env", tools=("say", "fail")) as dialogues:
        (begun,) = dialogues.prompts_of([prompt])
        assert len(begun.images) == 1 and begun.messages[-1].content.count("<image>") == 1
        assert len(begun.token_ids_P) > len(prompt.token_ids_P)
        (dialogue,) = dialogues.open(begun, [0])
        for reply in play(dialogue, call("say"), call("fail"), call(text.encode().decode("unicode_escape", "ignore"))):
            observed = [token for token in reply.observation.token_ids_L.tolist() if token in special]
            bare = "<|im_end|>\n<|im_start|>user\n<tool_response></tool_response><|im_end|>\n<|im_start|>assistant\n"
            assert observed == [token for token in token_ids(tool_family, bare, ()) if token in special]
            assert reply.observation.images == ()
        assert dialogue.end().failure is None


FORKED = (
    GAME.replace("class Guess:", "import copy\n\n    class Guess:")
    + """
        def fork(self):
            return copy.deepcopy(self)
    """
)


def test_a_copy_goes_on_from_the_state_of_the_first_turn(write, opened, prompt):
    with opened(f"{write(FORKED)}:Guess", tools=("guess",), gives_reward=True) as dialogues:
        (begun,) = dialogues.prompts_of([prompt])
        (first,) = dialogues.open(begun, [0])
        (reply,) = play(first, call("guess", number=3))
        assert reply.turn.answer == "higher"
        second, third = first.fork(), first.fork()
        (wrong,), (right,) = play(first, call("guess", number=8)), play(second, call("guess", number=7))
        assert (wrong.turn.answer, right.turn.answer) == ("lower", "right")
        assert play(third.fork(), call("guess", number=7))[0].turn.answer == "right"
        assert play(third, call("guess", number=9))[0].turn.answer == "lower"
        assert [each.end().outcome.value for each in (first, second, third)] == [0.0, 1.0, 0.0]


def test_copies_share_a_process_until_the_last_has_ended(write, opened, prompt):
    with opened(f"{write(FORKED)}:Guess", tools=("guess",), gives_reward=True) as dialogues:
        (begun,) = dialogues.prompts_of([prompt])
        processes = dialogues._settings[None].processes
        (first,) = dialogues.open(begun, [0])
        play(first, call("guess", number=3))
        second = first.fork()
        first.end()
        assert processes._idle == []
        second.end()
        assert len(processes._idle) == len(processes._all) == 1


def test_copies_of_a_failed_environment_fail_too(write, opened, prompt):
    source = FORKED.replace("self.left -= 1", "self.left -= 1\n            if number == 9: raise SystemExit('gone')")
    with opened(f"{write(source)}:Guess", tools=("guess",), gives_reward=True) as dialogues:
        (begun,) = dialogues.prompts_of([prompt])
        (first,) = dialogues.open(begun, [0])
        play(first, call("guess", number=3))
        second = first.fork()
        play(first, call("guess", number=9))
        assert "gone" in first.end().failure
        assert play(second, call("guess", number=7))[0].observation is None
        assert "forked" in second.end().failure and second.end().outcome is None
        assert not dialogues._settings[None].processes._all


def test_an_environment_that_answers_itself_as_its_copy_fails(write, opened, prompt):
    source = FORKED.replace("copy.deepcopy(self)", "self")
    with opened(f"{write(source)}:Guess", tools=("guess",), gives_reward=True) as dialogues:
        (begun,) = dialogues.prompts_of([prompt])
        (first,) = dialogues.open(begun, [0])
        play(first, call("guess", number=3))
        second = first.fork()
        assert "copy.deepcopy(self)" in first.end().failure and first.end() == second.end()
