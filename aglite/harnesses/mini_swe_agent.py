"""mini-SWE-agent: one `bash` tool, Chat Completions without streaming, no compaction."""

from __future__ import annotations

from aglite.harnesses.base import Harness, Kit, Order


def kit(order: Order) -> Kit:
    return Kit(
        command=[
            "mini",
            "--yolo",
            "--exit-immediately",
            f"--model=openai/{order.model}",
            "--cost-limit=0",
            # Naming any configuration leaves the default one out, so it is named first.
            "--config=mini.yaml",
            f"--config=model.model_kwargs.timeout={order.max_hold_s + 60:.0f}",
            *order.args,
            f"--task={order.prompt}",
        ],
        env={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            # It tries again whatever the error, a used-up limit too; ten tries would take five minutes. Each of these
            # is three of the SDK's.
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "4",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    )


HARNESS = Harness(
    name="mini-swe-agent",
    program="mini",
    package="mini-swe-agent",
    version="2.4.6",
    installer="pip",
    dialect="chat",
    kit=kit,
)
