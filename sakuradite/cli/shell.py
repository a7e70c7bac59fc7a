"""The interactive shell: a state that is kept, questions about it, and every command; history and completion."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakuradite.cli.exits import UsageError
from sakuradite.cli.options import checkpoint_name, read_file, read_json_file
from sakuradite.cli.output import console
from sakuradite.cli.place import Place
from sakuradite.errors import SakuraditeError

if TYPE_CHECKING:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document

    from sakuradite import DecisionResult, SyncClient

HELP = """\
  model NAME                         decide with this model; without a NAME, tell which
  state TEXT                         what to decide on; kept until you set another
  state-file FILE                    the same from a file, as JSON if it ends in .json
  image FILE, images                 add an image to the state; without FILE drop them
  noul STATEMENT                     the probability that it is true
  choice TEXT | NAME: ABOUT | NAME   which option fits; descriptions are optional
  score TEXT | LOWEST | … | HIGHEST  where on the list
  questions FILE                     a JSON map of questions, all at once
  show                               what is kept
  exit                               or Ctrl-D
Every command works too: {commands}; COMMAND --help explains one."""
MODEL_WORDS = {"model", "load", "unload", "run", "rm", "inspect", "pull"}
FILE_WORDS = {"state-file", "image", "questions"}


@dataclass
class Kept:
    """What the shell remembers between two lines."""

    place: Place
    model: str | None = None
    state: Any = None
    images: list[Path] = field(default_factory=list)
    client: SyncClient | None = None

    def connected(self) -> SyncClient:
        """The client of the daemon, opened at its first use."""
        if self.client is None:
            self.client = self.place.client()
        return self.client

    def close(self) -> None:
        """Close the client, if there is one."""
        if self.client is not None:
            self.client.close()


def shell(place: Place) -> None:
    """Read and do lines until Ctrl-D or `exit`. Ctrl-C ends what is running, not the shell."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
    from prompt_toolkit.completion import ThreadedCompleter
    from prompt_toolkit.history import FileHistory

    from sakuradite import __version__

    kept = Kept(place)
    print(f"Sakuradite {__version__}, {place.daemon_url()}. `help` lists the words, Tab completes, Ctrl-D ends.")
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(_history(place))),
        completer=ThreadedCompleter(_completer(kept)),
        auto_suggest=AutoSuggestFromHistory(),
        complete_while_typing=False,
    )
    with contextlib.closing(kept):
        while True:
            try:
                line = session.prompt("sakuradite> ").strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if line in ("exit", "quit"):
                return
            if line:
                do(kept, line)


def do(kept: Kept, line: str) -> None:
    """Do one line; what is wrong with it is said in a line."""
    from sakuradite.cli import exits

    word, _, rest = line.partition(" ")
    action = WORDS.get(word)
    try:
        if action is not None:
            action(kept, rest.strip())
        else:
            exits.run([*_options(kept.place), *shlex.split(line)])
    except SakuraditeError as error:
        exits.fail(str(error), exits.code_of(error))
    except ValueError as error:  # of shlex: a quotation that is not closed
        exits.fail(str(error), exits.USAGE)
    except KeyboardInterrupt:
        exits.fail("interrupted", exits.INTERRUPTED)


def _options(place: Place) -> Iterator[str]:
    if place.base_url:
        yield from ("--base-url", place.base_url)
    if place.home:
        yield from ("--home", str(place.home))


def _help(kept: Kept, rest: str) -> None:
    print(HELP.format(commands=", ".join(commands())))


def _model(kept: Kept, name: str) -> None:
    if name:
        kept.model = checkpoint_name(name)
    print(f"model: {_chosen(kept)}")


def _state(kept: Kept, text: str) -> None:
    if text:
        kept.state = text
    _show(kept, "")


def _state_file(kept: Kept, name: str) -> None:
    path = Path(name).expanduser()
    if path.suffix.lower() == ".json":
        kept.state = read_json_file(path)
    else:
        try:
            kept.state = read_file(path).decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from None
    _show(kept, "")


def _image(kept: Kept, name: str) -> None:
    path = Path(name).expanduser()
    read_file(path)
    kept.images.append(path)
    _show(kept, "")


def _images(kept: Kept, rest: str) -> None:
    kept.images.clear()
    _show(kept, "")


def _show(kept: Kept, rest: str) -> None:
    from sakuradite.questions import render

    state = "none yet" if kept.state is None else render(kept.state)
    print("state:", state if len(state) <= 300 else f"{state[:300]}… ({len(state)} characters)")
    if kept.images:
        print("images:", ", ".join(str(path) for path in kept.images))


def _noul(kept: Kept, text: str) -> None:
    if not text:
        raise UsageError("noul needs a statement, as: noul The customer asks for a refund.")
    _ask(kept, {text: {"type": "noul", "instructions": text}})


def _choice(kept: Kept, text: str) -> None:
    about, *options = [part.strip() for part in text.split("|")]
    if not options:
        raise UsageError("choice needs options, as: choice Which team? | billing: invoices, charges | shipping")
    named = [option.partition(":") for option in options]
    criteria = {name.strip(): text.strip() or None for name, _, text in named}
    if len(criteria) < len(options) or "" in criteria:
        raise UsageError("each option needs a name of its own")
    _ask(kept, {about or "choice": {"type": "choice", "instructions": about or None, "criteria": criteria}})


def _score(kept: Kept, text: str) -> None:
    about, *levels = [part.strip() for part in text.split("|")]
    if not levels:
        raise UsageError("score needs levels from the lowest to the highest, as: score How urgent? | can wait | today")
    _ask(kept, {about or "score": {"type": "score", "instructions": about or None, "criteria": levels}})


def _questions(kept: Kept, name: str) -> None:
    _ask(kept, read_json_file(Path(name).expanduser()))


def _ask(kept: Kept, questions: Any) -> None:
    """Decide and print the answers with bars."""
    from sakuradite.cli.answers import print_answers
    from sakuradite.cli.progress import spinner

    if kept.state is None:
        raise UsageError("there is nothing to decide on yet: state TEXT")
    model = _chosen(kept)
    with spinner(f"asking {model}"):
        result: DecisionResult = kept.connected().decide(kept.state, questions, images=kept.images, model=model)
    print_answers(result.answers, console())


def _chosen(kept: Kept) -> str:
    """The model to decide with: the one named, the setting's, else the first that is loaded."""
    from sakuradite.config import client_settings

    name = kept.model or client_settings(kept.place.home).model
    if name is None:
        ready = kept.connected().models.ready()
        if not ready:
            raise UsageError("no model is loaded; load one: load MODEL")
        name = ready[0]
    return name


WORDS: dict[str, Callable[[Kept, str], None]] = {
    "help": _help,
    "model": _model,
    "state": _state,
    "state-file": _state_file,
    "image": _image,
    "images": _images,
    "noul": _noul,
    "choice": _choice,
    "score": _score,
    "questions": _questions,
    "show": _show,
}


def _history(place: Place) -> Path:
    """The file of earlier lines, which hold states: readable by its owner alone."""
    from sakuradite.config import home_directory

    home, _ = home_directory(place.home)
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = home / "history"
    path.touch(mode=0o600)
    return path


def commands() -> dict[str, Any]:
    """The commands by name, as the parser knows them."""
    from typer.main import get_command

    from sakuradite.cli.app import app

    group: Any = get_command(app)
    found: dict[str, Any] = group.commands
    return found


def _completer(kept: Kept) -> Completer:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter

    class Words(Completer):
        """Words first; then files, options and model names, by the first word."""

        def __init__(self) -> None:
            self.paths = PathCompleter(expanduser=True)
            self.commands = commands()

        def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
            before = document.text_before_cursor.lstrip()
            first, space, rest = before.partition(" ")
            if not space:
                yield from self._matching(first, [*WORDS, *self.commands, "exit"])
                return
            last = rest.rpartition(" ")[2]
            if last.startswith("-") and first in self.commands:
                parameters = self.commands[first].params
                yield from self._matching(last, [option for p in parameters for option in p.opts if option[0] == "-"])
            elif first in FILE_WORDS or _takes_file(rest):
                yield from self.paths.get_completions(_document(last), event)
            elif first in MODEL_WORDS and " " not in rest:
                yield from self._matching(last, _model_names(kept))

        def _matching(self, start: str, names: Iterable[str]) -> Iterator[Completion]:
            for name in sorted(set(names)):
                if name.startswith(start):
                    yield Completion(name, start_position=-len(start))

    return Words()


def _takes_file(rest: str) -> bool:
    """Whether the word being typed follows an option that names a file."""
    words = rest.split(" ")
    return len(words) > 1 and words[-2] in ("--questions", "-q", "--state-file", "--image", "--output", "-o")


def _document(text: str) -> Document:
    from prompt_toolkit.document import Document

    return Document(text)


def _model_names(kept: Kept) -> list[str]:
    """The models that the daemon knows; none where it does not say."""
    try:
        client = kept.connected()
        names = list(client.models.ready())
        names += [status.model for status in client.models.list()]
    except SakuraditeError:  # completion must not disturb the line that is being typed
        return []
    return names
