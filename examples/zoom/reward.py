"""A measure of where a policy looked. recipes/zoom-demo.yaml gives it the weight 0, so GRPO learns from the answers
alone."""

from tiercel.geometry import to_original
from tiercel.reward_types import Sample

LARGEST_SHARE = 1 / 3  # of the picture's width; a larger region shows other digits too


def zoomed_right(sample: Sample) -> float:
    """Return 1 if a zoom showed the whole digit in the ring and no other one, else 0."""
    left, top, right, bottom = sample.columns["digit_box"]
    picture, space = sample.images[0], sample.coordinate_space
    assert space is not None  # Qwen2.5-VL's is known
    for call in (call for turn in sample.turns for call in turn.calls):
        if call.name != "zoom" or call.failure is not None or call.arguments.get("image", 1) != 1:
            continue
        x1, y1, x2, y2 = to_original(call.arguments["box"], space, picture.original_size, picture.processed_size)
        is_inside = x1 <= left and y1 <= top and right <= x2 and bottom <= y2
        if is_inside and x2 - x1 <= LARGEST_SHARE * picture.original_size[0]:
            return 1.0
    return 0.0
