"""tiercel from Python: `import tiercel as tc`. Each function does the same as the command of its name, with the same
keys and the same run directory."""

from tiercel.api.script_errors import shorten_errors

shorten_errors()
