"""Files that would run a command if something unpickled, imported or evaluated them. The command creates one file."""

import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """A canary: `file` exists once any of the payloads has run."""

    file: Path

    @property
    def command(self) -> str:
        return f"touch {self.file}"

    def pickled(self) -> bytes:
        """Return a pickle, written by hand: os.system(command)."""
        return f"cos\nsystem\n(S'{self.command}'\ntR.".encode()

    def pickled_binary(self) -> bytes:
        """Return the same in protocol 2, which is not UTF-8."""
        command = self.command.encode()
        return b"\x80\x02cos\nsystem\nX" + len(command).to_bytes(4, "little") + command + b"\x85R."

    def torch_file(self) -> bytes:
        """Return a file as torch.save writes it, with that pickle in it."""
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("archive/data.pkl", self.pickled_binary())
            archive.writestr("archive/version", "3\n")
        return stream.getvalue()

    def numpy_file(self) -> bytes:
        """Return an .npy file of one object."""
        header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
        header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
        return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + self.pickled_binary()

    def module(self) -> bytes:
        """Return Python code that runs the command when it is imported, whatever is requested from it."""
        return f"import os\nos.system({self.command!r})\n\n\ndef __getattr__(name):\n    return object\n".encode()

    def yaml(self) -> tuple[str, ...]:
        """Return values that a careless YAML reader would run."""
        command = json.dumps(self.command)
        return (
            f"!!python/object/apply:os.system [{command}]",
            f"!!python/object/new:os.system [{command}]",
            f"!!python/object/apply:subprocess.check_output [[touch, {json.dumps(str(self.file))}]]",
            "!!python/name:os.system",
            "!!python/module:os",
            f"!!python/object/apply:builtins.eval [{json.dumps(self.expression())}]",
        )

    def templates(self) -> tuple[str, ...]:
        """Return chat templates that try to reach the interpreter."""
        call = f"({self.command!r})"
        return (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ ''['__class__']['__mro__'] }}",
            "{{ ''|attr('__class__') }}" + "{{ (''|attr('__class__'))() }}",
            "{{ cycler.__init__.__globals__.os.popen" + call + ".read() }}",
            "{{ lipsum.__globals__['os'].popen" + call + " }}",
            "{{ joiner.__init__.__globals__.os.system" + call + " }}",
            "{{ namespace.__init__.__globals__.os.system" + call + " }}",
            "{{ self.__init__.__globals__.__builtins__.__import__('os').system" + call + " }}",
            "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.system" + call + " }}",
            "{{ raise_exception.__globals__['__builtins__']['__import__']('os').system" + call + " }}",
            "{{ strftime_now.__globals__['__builtins__']['eval'](" + repr(self.expression()) + ") }}",
            "{{ messages.__class__.__init__.__globals__ }}{{ messages.append(1) }}",
            "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
            "{% set x = ''.format_map.__self__.__class__ %}{{ x.__base__.__subclasses__() }}",
            "{% import 'os' as os %}{{ os.system" + call + " }}",
            "{% include '/etc/passwd' %}",
            "{% extends '/etc/passwd' %}",
            "{{ range(10 ** 12) | list }}",
            "{{ 1 / 0 }}",
            "{{ messages[99].role.x.y }}",
        )

    def expression(self) -> str:
        """Return an expression for eval."""
        return f"__import__('os').system({self.command!r})"
