-- Replies that a later request may name instead of sending the conversation again (`previous_response_id`).

ALTER TABLE calls ADD COLUMN reply_id TEXT; -- as the agent was told it; null when the reply cannot be named
CREATE INDEX calls_reply ON calls(reply_id, rollout_id) WHERE reply_id IS NOT NULL;
