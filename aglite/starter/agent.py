import json
import os
from pathlib import Path

from openai import OpenAI

task = json.loads(Path(os.environ["AGLITE_TASK_FILE"]).read_text())  # the public part of the task
reply = OpenAI().chat.completions.create(  # finds OPENAI_BASE_URL and OPENAI_API_KEY
    model="default",
    messages=[
        {"role": "system", "content": "Answer with one word."},
        {"role": "user", "content": f"What is the opposite of {task['word']}?"},
    ],
    max_tokens=16,
)
Path("answer.txt").write_text(reply.choices[0].message.content)
