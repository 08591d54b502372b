# KTO: learn from answers labelled good or bad. `python kto.py` trains the demo's tiny model on a CPU, offline.
from PIL import Image

import tiercel as tc
from tiercel.demo.pointing import START

picture, question = Image.new("RGB", (112, 112), "white"), {"role": "user", "content": "<image>Where is the two?"}
turns = [[question, {"role": "assistant", "content": f"[{x}, 28, 84, 84]"}] for x in range(0, 64, 8)]
rows = [{"messages": each, "label": number % 2 == 0, "images": [picture]} for number, each in enumerate(turns)]
run = tc.kto(model={"path": START, "dtype": "float32"}, data=rows, kto={}, steps=2, output="runs/kto")
print(run.metrics[-1]["labels/reward_desirable"], run.metrics[-1]["labels/reward_undesirable"])
