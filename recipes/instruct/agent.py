"""An agent that follows an instruction: it drafts an answer, checks it, and asks once more if the check complains.

It knows nothing of training. The SDK reads OPENAI_BASE_URL and OPENAI_API_KEY; the task is the JSON file that
AGLITE_TASK_FILE names; the answer goes to answer.txt.
"""

import gc

gc.disable()  # the program lives for a moment only, and loading the SDK is a fifth faster without collections

import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
from pathlib import Path  # noqa: E402

from openai import OpenAI  # noqa: E402

SYSTEM = {"role": "system", "content": "Be brief."}
MAX_TOKENS = 28


def ask(client: OpenAI, *turns: str) -> tuple[str, bool]:
    """The reply to a conversation of alternating turns (the user's first), and whether it ended by itself."""
    roles = ("user", "assistant")
    messages = [SYSTEM, *({"role": roles[i % 2], "content": text} for i, text in enumerate(turns))]
    model = os.environ.get("MODEL", "default")
    choice = client.chat.completions.create(model=model, messages=messages, max_tokens=MAX_TOKENS).choices[0]
    return (choice.message.content or "").strip(), choice.finish_reason != "length"


def complaint(task: dict, reply: str, ended: bool) -> str | None:
    """What is wrong with the form of `reply`, as a request to do better; None if nothing is."""
    if not ended:
        return "Be shorter."
    if task["kind"] == "sentence":
        count = len(reply.split())
        if task["word"] not in reply.lower():
            return f'Use the word "{task["word"]}".'
        if count > task["most"]:
            return f"Not {count} words, at most {task['most']}."
        return None if reply.endswith(task["mark"]) else f"End with {task['mark']}"
    if task["kind"] == "json":
        try:
            found = json.loads(reply)
        except ValueError:
            return "Only valid JSON."
        return None if isinstance(found, dict) and set(found) == {"name", "age"} else 'Only the keys "name" and "age".'
    if re.search(r"[\n:\d]", reply):
        return "Only commas, one line, no numbers."
    items = [item.strip().lower() for item in reply.split(",")]
    if len(set(items)) < len(items):
        return "No item twice."
    return None if len(items) == task["count"] else f"Exactly {task['count']}, not {len(items)}."


def main() -> None:
    task = json.loads(Path(os.environ["AGLITE_TASK_FILE"]).read_text())
    client = OpenAI()
    instruction = task["instruction"]
    reply, ended = ask(client, instruction)
    wrong = complaint(task, reply, ended)
    if wrong:
        print(f"draft: {reply!r}\ncomplaint: {wrong}")
        if os.environ.get("REVISE", "fresh") == "chat":
            reply, ended = ask(client, instruction, reply, wrong)
        else:
            reply, ended = ask(client, f"{instruction} {wrong}")
    print(f"answer: {reply!r}")
    Path("answer.txt").write_text(reply if ended else "")


if __name__ == "__main__":
    main()
