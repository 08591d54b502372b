# GRPO: learn from a reward of your own. `python grpo.py` trains the demo's tiny model on a CPU, offline.
from PIL import Image

import tiercel as tc
from tiercel.demo.pointing import START


def right(completion, answer):
    return float(str(answer[0]) in completion)


picture, question = Image.new("RGB", (112, 112), "white"), {"role": "user", "content": "<image>Where is the two?"}
rows = [{"messages": [question], "images": [picture], "answer": [28, 28, size, 84]} for size in range(40, 104, 8)]
run = tc.grpo(model={"path": START, "dtype": "float32"}, data=rows, rewards=[right, "iou"], steps=2, output="runs/grpo")
print(run.metrics[-1]["reward/mean"], run.rollouts()[0].completions[0].text)
