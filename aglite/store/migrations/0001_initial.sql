-- What a run is made of. Migrations run in order, each in one transaction; PRAGMA user_version is the last one's number.
-- Times are Unix seconds (REAL). Token arrays are packed little-endian int32, log-probabilities float32.
-- JSON columns hold objects or arrays, never null text.

CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE tasks (
    id TEXT NOT NULL,
    split TEXT NOT NULL,                 -- train | val
    position INTEGER NOT NULL,           -- order in its source
    row TEXT NOT NULL,                   -- {"id", "public", "hidden"}
    PRIMARY KEY (split, id)
) WITHOUT ROWID;

CREATE TABLE groups (
    id TEXT PRIMARY KEY,
    task_id TEXT NOT NULL,
    split TEXT NOT NULL,
    size INTEGER NOT NULL,               -- rollouts wanted
    state TEXT NOT NULL,                 -- open | complete | trained | dropped | rolled_back
    eval_id INTEGER,                     -- the evaluation it belongs to, if any
    created_version INTEGER NOT NULL,
    refills INTEGER NOT NULL DEFAULT 0,
    step INTEGER,                        -- the step that trained it
    created_at REAL NOT NULL,
    finished_at REAL
) WITHOUT ROWID;

CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY,             -- order of creation
    id TEXT NOT NULL UNIQUE,
    task_id TEXT NOT NULL,
    group_id TEXT REFERENCES groups(id), -- null: an external rollout without a group
    split TEXT NOT NULL,
    state TEXT NOT NULL,                 -- queued starting running grading done failed error cancelled
    cause TEXT NOT NULL DEFAULT '',
    attempt INTEGER NOT NULL DEFAULT 0,  -- the current or last one, from 1; 0 before the first
    backend TEXT NOT NULL,
    token_hash BLOB,                     -- sha256 of the attempt's bearer token
    exit_code INTEGER,
    reward REAL,
    breakdown TEXT NOT NULL DEFAULT '{}',
    flags TEXT NOT NULL DEFAULT '[]',
    step INTEGER,                        -- the step that trained it
    fate TEXT NOT NULL DEFAULT '',       -- of its training: trained | baseline_only | stale | rolled_back | '' not yet
    created_at REAL NOT NULL,
    started_at REAL,
    finished_at REAL
);
CREATE INDEX rollouts_group ON rollouts(group_id);
CREATE INDEX rollouts_state ON rollouts(state);
CREATE INDEX rollouts_step ON rollouts(step);

CREATE TABLE rollout_states (            -- every change of state, in order
    rollout_id TEXT NOT NULL REFERENCES rollouts(id),
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL,
    cause TEXT NOT NULL,
    at REAL NOT NULL
);
CREATE INDEX rollout_states_rollout ON rollout_states(rollout_id);

CREATE TABLE messages (                  -- content-addressed message bodies
    id INTEGER PRIMARY KEY,
    hash BLOB NOT NULL UNIQUE,           -- first 16 bytes of sha256
    body TEXT NOT NULL
);

CREATE TABLE calls (                     -- the token arrays come last: SQLite reads a long row only as far as it must
    id INTEGER PRIMARY KEY,
    rollout_id TEXT NOT NULL REFERENCES rollouts(id),
    attempt INTEGER NOT NULL,
    parent_id INTEGER,                   -- longest recorded prompt+response that is a prefix of this prompt
    matched_id INTEGER,                  -- the call that the messages continue; with parent_id it names the fork
    fork_cause TEXT NOT NULL DEFAULT '', -- '' when it continues its parent, else first new_thread edited template retokenised
    base_id INTEGER,                     -- an earlier call of the attempt: prompt = (prompt+response of base)[:base_len] + new_prompt_ids
    base_len INTEGER NOT NULL DEFAULT 0,
    prompt_len INTEGER NOT NULL,
    response_len INTEGER NOT NULL,
    versions TEXT NOT NULL,              -- [[version, count], ...]
    version_min INTEGER,                 -- of the sampled tokens
    version_max INTEGER,
    dialect TEXT NOT NULL,
    base_messages INTEGER NOT NULL DEFAULT 0, -- base_id's list is its prompt's messages and then its reply, if any
    new_messages BLOB NOT NULL,          -- packed int64 ids into messages: those after the first base_messages of base_id's list
    reply_message INTEGER,               -- id into messages
    request TEXT NOT NULL,               -- what the agent asked for: sampling, tools hash, stop, stream ...
    finish_reason TEXT NOT NULL DEFAULT '',
    status TEXT NOT NULL,                -- ok | error | cancelled
    error TEXT NOT NULL DEFAULT '',
    delivered INTEGER NOT NULL DEFAULT 0,
    retry_of INTEGER,                    -- the earlier call that this unused copy repeats
    constrained INTEGER NOT NULL DEFAULT 0,
    held_s REAL NOT NULL DEFAULT 0,
    started_at REAL NOT NULL,
    first_token_at REAL,
    finished_at REAL NOT NULL,
    new_prompt_ids BLOB NOT NULL,
    response_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL               -- one a response token; empty when the engine gives none
);
-- Holds all that a list of rollouts adds up, so that it never reads the calls themselves.
CREATE INDEX calls_rollout ON calls(rollout_id, attempt, prompt_len, response_len, version_min, version_max);

CREATE TABLE samples (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    rollout_id TEXT NOT NULL REFERENCES rollouts(id),
    calls TEXT NOT NULL,                 -- [[call id, trained 0|1], ...] from root to leaf
    tokens INTEGER NOT NULL,
    trained_tokens INTEGER NOT NULL,
    advantage REAL NOT NULL,
    weight REAL NOT NULL,                -- of each trained token
    rolled_back INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX samples_step ON samples(step);
CREATE INDEX samples_rollout ON samples(rollout_id, rolled_back, trained_tokens);

CREATE TABLE steps (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,               -- from 1; after a roll back a number is used again
    version INTEGER NOT NULL,            -- the policy version it made; of a skipped step the one it left
    state TEXT NOT NULL,                 -- applied | skipped | rolled_back
    metrics TEXT NOT NULL,
    started_at REAL NOT NULL,
    finished_at REAL NOT NULL
);

CREATE TABLE policy_versions (
    version INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    state TEXT NOT NULL,                 -- live | rolled_back
    created_at REAL NOT NULL
);

CREATE TABLE checkpoints (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    version INTEGER NOT NULL,
    path TEXT NOT NULL,
    state TEXT NOT NULL,                 -- kept | removed | rolled_back
    created_at REAL NOT NULL
);

CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    version INTEGER NOT NULL,
    split TEXT NOT NULL,
    state TEXT NOT NULL,                 -- running | done | abandoned | rolled_back
    result TEXT NOT NULL DEFAULT '{}',
    started_at REAL NOT NULL,
    finished_at REAL
);

CREATE TABLE phases (
    id INTEGER PRIMARY KEY,
    phase TEXT NOT NULL,
    cause TEXT NOT NULL,
    started_at REAL NOT NULL,
    finished_at REAL
);

CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    level TEXT NOT NULL,                 -- info | warning | error
    kind TEXT NOT NULL,                  -- phase rollout step evaluation checkpoint engine run
    text TEXT NOT NULL,
    data TEXT NOT NULL DEFAULT '{}'
);
