from __future__ import annotations

import io

from rich.console import Console

from agentrl.progress import Progress


def shown(*, terminal: bool, no_color: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, no_color=no_color, width=100)
    with Progress(console) as progress, progress.stage("train", 2) as outer:
        for i in range(2):
            with progress.stage("collect", 3) as inner:
                for _ in range(3):
                    inner.advance(1, reward=0.123456)
            outer.advance(kl=0.5, n=i)
    return stream.getvalue()


def test_plain_lines_without_a_terminal() -> None:
    for text in (shown(terminal=False), shown(terminal=True, no_color=True)):
        assert text == "train 2/2 kl=0.5 n=1 0 s\n"


def test_bars_on_a_terminal_leave_one_line() -> None:
    text = shown(terminal=True)
    assert "\x1b" in text
    assert text.rstrip().endswith("\x1b[?25h") or "train 2/2 kl=0.5 n=1 0 s" in text


def test_a_stage_that_did_nothing_says_nothing() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream)) as progress, progress.stage("nothing"):
        pass
    assert stream.getvalue() == ""


def test_markup_in_names_is_text() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream)) as progress, progress.stage("[red]x[/]") as stage:
        stage.advance()
    assert stream.getvalue() == "[red]x[/] 1 0 s\n"
