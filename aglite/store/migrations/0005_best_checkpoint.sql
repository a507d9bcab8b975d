-- Which checkpoint did best in validation, so that whoever looks for it need not compare evaluations.

ALTER TABLE checkpoints ADD COLUMN best INTEGER NOT NULL DEFAULT 0;
