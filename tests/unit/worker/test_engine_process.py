"""What the launcher says of a vLLM that refused to start."""

import pytest

from rolloutfleet_worker.engine_process import root_cause, serve_command


def test_the_first_error_that_is_not_a_consequence_is_the_cause():
    lines = [
        "(EngineCore pid=7) ERROR 11-30 18:00:00 [core.py:1] EngineCore failed to start.",
        "(EngineCore pid=7) ERROR 11-30 18:00:00 [core.py:1] Traceback (most recent call last):",
        "(EngineCore pid=7) ERROR 11-30 18:00:00 [core.py:1] ValueError: head size 16 is not supported",
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert root_cause(lines) == "ValueError: head size 16 is not supported"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            ["usage: vllm serve", "vllm serve: error: unrecognized arguments: --no-such=1"],
            "vllm serve: error: unrecognized arguments: --no-such=1",
        ),
        (["OSError: /models/none is not a local folder"], "OSError: /models/none is not a local folder"),
        (
            [
                "pydantic_core.ValidationError: 1 validation error for ModelConfig",
                "  Value error, max_model_len (9) is greater than 8. [type=value_error, input_value=ArgsKwargs(())]",
            ],
            "pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, max_model_len (9) is greater than 8.",
        ),
        (
            ["vllm.v1.engine.exceptions.EngineDeadError: See above."],
            "vllm.v1.engine.exceptions.EngineDeadError: See above.",
        ),
        (["Killed", ""], "Killed"),
        ([], "no output"),
    ],
)
def test_the_cause_is_found_in_other_outputs_too(lines: list[str], cause: str):
    assert root_cause(lines) == cause


@pytest.mark.row("A13")
def test_vllm_is_served_with_our_engine_and_fence_and_the_users_arguments():
    command = serve_command(["/models/model", "--enforce-eager"])
    assert command[2:6] == ["vllm.entrypoints.cli.main", "serve", "/models/model", "--enforce-eager"]
    assert '--weight-transfer-config={"backend": "rolloutfleet"}' in command
    assert "--middleware=rolloutfleet_worker.middleware.FleetMiddleware" in command
