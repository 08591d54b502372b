"""Converting a checkpoint of the peer from which the command goes on."""

from tiercel.importing.draft import RecipeDraft
from tiercel.importing.tuning import tuner_of

_FLAG = "--resume_from_checkpoint"
_SWITCH = ("true", "false", "null", "none", "")


def set_resumed(draft: RecipeDraft) -> None:
    """Start from the adapter of a checkpoint that the command goes on from, or name what to write for whole weights."""
    words = draft.launch.flags.get("resume_from_checkpoint", ())
    if not words or words[0].lower() in _SWITCH:
        text = "the same command resumes from the newest checkpoint in `output`, which must be tiercel's own"
        draft.note(text, _FLAG, is_change=False)
        return
    lost = "its optimiser, its place in the rows and its step are not read, and the run begins at step 0"
    if tuner_of(draft.launch) == "full":
        draft.note(f"no checkpoint of tiercel: {lost}; for its weights write model.path: {words[0]}", _FLAG)
        return
    if "lora.init" not in draft.values:
        draft.set("lora.init", words[0], _FLAG, remark="the adapter of that checkpoint")
    draft.note(f"no checkpoint of tiercel: {lost}; lora.init takes an adapter only", _FLAG)
