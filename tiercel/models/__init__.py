import logging

# PEFT imports bitsandbytes where it is installed, and that asks for another package's kernel, which is not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
