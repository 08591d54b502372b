# SFT: learn from answers. `python sft.py` trains the demo's tiny model on a CPU, offline.
from PIL import Image

import tiercel as tc
from tiercel.demo.pointing import START

picture, question = Image.new("RGB", (112, 112), "white"), {"role": "user", "content": "<image>Where is the two?"}
rows = [{"messages": [question, {"role": "assistant", "content": "[28, 28, 84, 84]"}], "images": [picture]}] * 8
run = tc.sft(model={"path": START, "dtype": "float32"}, data=rows, lora={"rank": 8}, steps=2, output="runs/sft")
print(run.metrics[-1]["loss"], tc.load(run).generate("Where is the two?", images=[picture]).text)
