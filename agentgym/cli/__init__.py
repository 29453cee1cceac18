"""The command line: `agentgym envs`, `rollout`, `inspect` and so on. Nothing imports it; it may import everything."""
