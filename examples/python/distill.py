# Distillation: the demo's tiny model learns from itself, told the answer. `python distill.py`, on a CPU, offline.
from PIL import Image

import tiercel as tc
from tiercel.demo.pointing import START

picture, question = Image.new("RGB", (112, 112), "white"), {"role": "user", "content": "<image>Where is the two?"}
rows = [{"messages": [question], "images": [picture], "answer": "[28, 28, 84, 84]"}] * 8
model, rollout = {"path": START, "dtype": "float32"}, {"group_size": 2, "max_new_tokens": 12}
teacher = {**model, "prompt": "{prompt} It is at {answer}."}
run = tc.distill(model=model, teacher=teacher, data=rows, rollout=rollout, steps=2, output="runs/distill")
print(run.metrics[-1]["teacher/kl"], run.rollouts()[0].completions[0].text)
