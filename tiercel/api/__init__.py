"""tiercel from Python: `import tiercel as tc`. Each function does what the command of its name does, with the same keys
and the same run directory."""
