"""The worker: elastic session, PPO, statistics, networks, envs."""
