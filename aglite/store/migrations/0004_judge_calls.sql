-- What graders asked a judge model, and what it answered.

CREATE TABLE judge_calls (
    id INTEGER PRIMARY KEY,
    rollout_id TEXT NOT NULL REFERENCES rollouts (id),
    attempt INTEGER NOT NULL,
    model TEXT NOT NULL,
    status INTEGER NOT NULL, -- HTTP; 0: the endpoint could not be reached
    request TEXT NOT NULL, -- JSON
    reply TEXT NOT NULL, -- JSON
    started_at REAL NOT NULL,
    finished_at REAL NOT NULL
);
CREATE INDEX judge_calls_rollout ON judge_calls (rollout_id);
