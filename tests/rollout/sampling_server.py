"""A server that speaks vLLM's protocol and really samples, with tiny weights and the adapters that it is given."""

import json
from pathlib import Path

import torch

from tests.rollout.scripted_server import Answer, ScriptedServer
from tiercel.config.schema import GrpoRecipe
from tiercel.data.encoding import prompt_encoder
from tiercel.data.reading import read_training_rows
from tiercel.models.policy import build_policy
from tiercel.models.vision_cache import VisionStore
from tiercel.models.weights.saving import restore_adapter
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import SamplingParams
from tiercel.rollout.vllm.routes import chat_messages
from tiercel.types import EncodedPrompt

FIRST_PROBE = 2**30  # numbers of weights from here on are not versions


class SamplingServer(ScriptedServer):
    """For a recipe of a tiny checkpoint: passes the gate, and answers for every training row."""

    def __init__(self, recipe: GrpoRecipe):
        self.policy = build_policy(recipe, torch.device("cpu"))
        family = self.policy.family
        encode = prompt_encoder(family, recipe.data)
        rows = read_training_rows(recipe.data, "grpo").rows
        self.prompts = {_key(prompt): prompt for prompt in (encode(row, 0) for row in rows)}
        super().__init__(
            lambda messages: self._prompt(messages).token_ids_P.tolist(), family.checkpoint.end_token_ids[0]
        )
        self.sampler = LocalSampler(self.policy, VisionStore(self.policy, 0))
        self.model_root = str(recipe.model.path)
        self.loaded = ""

    def _prompt(self, messages: object) -> EncodedPrompt:
        return self.prompts[json.dumps(messages)]

    def completion(self, body: Answer) -> Answer:
        if "allowed_token_ids" in body:
            return super().completion(body)
        params = SamplingParams(
            group_size=body["n"],
            min_new_tokens=body["min_tokens"],
            max_new_tokens=body["max_completion_tokens"],
            temperature=body["temperature"] or 1.0,
            top_p=body["top_p"],
            top_k=body["top_k"],
            stop=tuple(body["stop"]),
            greedy=body["temperature"] == 0,
        )
        with self.lock:
            if self.loaded != body["model"]:
                restore_adapter(self.policy, Path(self.adapters[body["model"]]))
                self.loaded = body["model"]
            (group,) = self.sampler.sample([self._prompt(body["messages"])], params, [body["seed"]])
        choices = [
            {
                "index": number,
                "finish_reason": "length" if completion.is_truncated else "stop",
                "message": {"role": "assistant", "content": completion.text},
                "token_ids": (ids := completion.token_ids_L.tolist()),
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": min(0.0, logprob), "bytes": [], "top_logprobs": []}
                        for token, logprob in zip(ids, completion.logprobs_L.tolist(), strict=True)
                    ]
                },
            }
            for number, completion in enumerate(group.completions)
        ]
        return {
            "model": body["model"],
            "choices": choices,
            "prompt_token_ids": group.prompt.token_ids_P.tolist(),
        }


def _key(prompt: EncodedPrompt) -> str:
    return json.dumps(chat_messages(prompt))


def version_of(answer: Answer) -> int:
    """The policy's; -1 for the gate's probe."""
    number = int(answer["model"].rsplit("-", 2)[1])
    return -1 if number >= FIRST_PROBE else number
