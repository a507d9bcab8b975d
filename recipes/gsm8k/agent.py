"""An agent that solves word problems with a calculator: it asks the model, computes what the model calls for, and asks
again, until the model answers.

It knows nothing of training. The SDK reads OPENAI_BASE_URL and OPENAI_API_KEY; the task is the JSON file that
AGLITE_TASK_FILE names; the last reply goes to answer.txt.
"""

import gc

gc.disable()  # the program lives for a moment only, and loading the SDK is a fifth faster without collections

import ast  # noqa: E402
import json  # noqa: E402
import operator  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

from openai import OpenAI  # noqa: E402

SYSTEM = (
    "Solve the problem step by step. Use the calculator for every computation. When you know the result, end with a "
    "line of the form\nAnswer: NUMBER"
)
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an arithmetic expression, such as (12 + 3) * 4 / 5.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "numbers, + - * / // % ** and brackets"}},
            "required": ["expression"],
        },
    },
}
TURNS = int(os.environ.get("TURNS", "8"))
MAX_TOKENS = int(os.environ.get("MAX_TOKENS", "512"))

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
LARGEST = 1e15


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, or what is wrong with it: the model reads either."""
    try:
        value = evaluate(ast.parse(expression.replace(",", "").replace("^", "**").strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        return f"error: {error}"
    return str(int(value)) if float(value).is_integer() else f"{value:.10g}"


def evaluate(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return within(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](evaluate(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = evaluate(node.left), evaluate(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > 64:
            raise ValueError("the exponent is too large")
        return within(OPERATIONS[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / // % ** and brackets can be computed")


def within(value: float) -> float:
    if isinstance(value, complex) or abs(value) > LARGEST:
        raise ValueError("the number is too large, or none")
    return value


def answer_call(call) -> str:
    """What the model is told for one of its tool calls."""
    if call.function.name != "calculate":
        return f"error: there is no tool {call.function.name!r}, only calculate"
    try:
        expression = json.loads(call.function.arguments)["expression"]
    except (ValueError, KeyError, TypeError):
        return 'error: the arguments have to be {"expression": "..."}'
    return calculate(str(expression))


def main() -> None:
    task = json.loads(Path(os.environ["AGLITE_TASK_FILE"]).read_text())
    client, model = OpenAI(), os.environ.get("MODEL", "default")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    answer = ""
    for _ in range(TURNS):
        choice = client.chat.completions.create(
            model=model, messages=messages, tools=[CALCULATOR], max_tokens=MAX_TOKENS
        ).choices[0]
        calls = choice.message.tool_calls or []
        messages.append(choice.message.model_dump(exclude_none=True))
        if not calls:
            answer = choice.message.content or "" if choice.finish_reason == "stop" else ""
            break
        for call in calls:
            result = answer_call(call)
            print(f"{call.function.arguments} -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(answer)
    Path("answer.txt").write_text(answer)


if __name__ == "__main__":
    main()
