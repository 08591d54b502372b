# DPO: learn which of two answers is better. `python dpo.py` trains the demo's tiny model on a CPU, offline.
from PIL import Image

import tiercel as tc
from tiercel.demo.pointing import START

picture, question = Image.new("RGB", (112, 112), "white"), {"role": "user", "content": "<image>Where is the two?"}
turns = [question, {"role": "assistant", "content": "[28, 28, 84, 84]"}]  # the better answer is the last turn
rows = [{"messages": turns, "rejected": f"[0, 0, {size}, {size}]", "images": [picture]} for size in range(40, 104, 8)]
run = tc.dpo(model={"path": START, "dtype": "float32"}, data=rows, dpo={"loss": "sigmoid"}, steps=2, output="runs/dpo")
print(run.metrics[-1]["pairs/margin"], run.metrics[-1]["pairs/accuracy"])
