-- Rollouts whose traffic was removed keep what was counted of it, so that lists of rollouts stay true.

ALTER TABLE rollouts ADD COLUMN pruned TEXT; -- {"calls", "samples", "prompt_tokens", ...} as in its JSON; null: all is there
