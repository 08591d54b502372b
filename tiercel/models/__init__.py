import logging

# If bitsandbytes is installed, PEFT imports it, and it warns about another package's kernel that is not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
