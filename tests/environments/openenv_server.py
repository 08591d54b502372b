"""Servers of OpenEnv for the tests: `python -m tests.environments.openenv_server KIND PORT`, on loopback."""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Guess(Action):
    """Guess the number."""

    number: int


class Hint(Observation):
    text: str
    tries: int = 0
    picture: str | None = None


class Guessing(Environment[Guess, Hint, State]):
    """The number is the row's answer, or follows from the seed. Each wrong guess costs a quarter."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, answer: int | None = None, **row: Any) -> Hint:
        self.number = answer if answer is not None else (seed or 0) % 10
        self.tries = 0
        return Hint(text=f"Guess, {row.get('id')}.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.number > 9:
            raise ValueError("only digits")
        self.tries += 1
        if action.number == self.number:
            return Hint(text="right", tries=self.tries, reward=1.0, done=True)
        picture = f"data:image/png;base64,{PNG}"
        return Hint(text="wrong", tries=self.tries, reward=-0.25, picture=picture)

    @property
    def state(self) -> State:
        return State()


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("tools")

        @mcp.tool
        def add(a: int, b: int) -> str:
            """Add two numbers."""
            return f"{a} + {b} = {a + b}"

        super().__init__(mcp)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **row: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("tools only")

    @property
    def state(self) -> State:
        return State()


KINDS: dict[str, Any] = {
    "guessing": (Guessing, Guess, Hint, 4),
    "single": (Guessing, Guess, Hint, 1),
    "tools": (Tools, CallToolAction, CallToolObservation, 4),
}


if __name__ == "__main__":
    environment, action, observation, sessions = KINDS[sys.argv[1]]
    app = create_fastapi_app(environment, action, observation, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
