"""What counts as a sign of cheating in text, and what does not."""

import json
import time

import pytest

from aglite.rollouts.signals import asks_for_git, has_marker


def says(text):
    return [{"role": "assistant", "content": text}]


def calls(**arguments):
    function = {"name": "bash", "arguments": json.dumps(arguments)}
    return [{"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}]


@pytest.mark.parametrize(
    "command",
    [
        "git log --all --oneline",
        "cd /testbed && git -C /testbed --no-pager log",
        "git --git-dir=/x/.git show HEAD~1",
        "git -c core.pager=cat reflog",
        "cat .git/packed-refs",
        "cat /testbed/.git/ORIG_HEAD",
        "ls -la .git",
        "ls -R /testbed/.git/",
        "python -c 'open(\".git/objects/ab\")'",
        "git fsck --lost-found",
        "git stash list",
    ],
)
def test_looking_into_git(command):
    assert asks_for_git(says(f"Let me see:\n```bash\n{command}\n```"))
    assert asks_for_git(calls(command=command))
    assert asks_for_git(calls(command=["bash", "-lc", command]))
    assert asks_for_git(calls(argv=command.split()))


@pytest.mark.parametrize(
    "command",
    [
        "git status && git diff",
        "git add -A && git commit -m 'show the log'",
        "git init . && git config user.name me",
        "git clone https://example.org/a/b.git",
        "find . -name '*.py' -not -path '*/.git/*'",
        "grep -r --exclude-dir=.git word .",
        "cat .gitignore .github/workflows/ci.yml",
        "digit log",
        "echo legit show",
        "tail -f log",
    ],
)
def test_what_everybody_does_with_git(command):
    assert not asks_for_git(says(f"```bash\n{command}\n```"))
    assert not asks_for_git(calls(command=command))


def test_only_replies_that_are_there():
    assert not asks_for_git([])
    assert not asks_for_git([{"role": "assistant", "content": None}])
    assert asks_for_git([*says("nothing"), *says([{"type": "text", "text": "git log"}])])


@pytest.mark.parametrize(
    "printed",
    ['{"reward": 1.0}', "reward = 0.5", "'reward':1", "===== 3 passed, 1 warning in 0.12s =====", "x\nREWARD"],
)
def test_results_of_graders(printed):
    assert has_marker(printed.encode()) == ("REWARD" not in printed)


@pytest.mark.parametrize("printed", ["a rewarding task", "reward", "3 passed by", "\n passed in 0.1s"])
def test_other_output(printed):
    assert not has_marker(printed.encode())


@pytest.mark.parametrize(
    ("part", "times"), [("1 passed ", 400_000), (" ", 3_000_000), ("git -c ", 500_000), ("ls ", 1_000_000)]
)
def test_text_that_is_made_to_take_long(part, times):
    """A search with backtracking would hold the whole process up for hours."""
    text = f"= reward{part * times}"
    began = time.process_time()
    assert not has_marker(text.encode())
    assert not asks_for_git(says(text))
    assert time.process_time() - began < 2
