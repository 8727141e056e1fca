"""Settings: the plan, schedules, presets, and the experiment that a configuration file describes."""
