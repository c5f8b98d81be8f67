"""`pgqueue completion SHELL`: the script that completes commands and options."""

import rich_click as click
from click.shell_completion import get_completion_class

_INSTALL = {
    "bash": 'eval "$(pgqueue completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(pgqueue completion zsh)"   # in ~/.zshrc',
    "fish": "pgqueue completion fish | source   # in ~/.config/fish/config.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(sorted(_INSTALL)))
@click.pass_context
def completion(ctx: click.Context, /, shell: str) -> None:
    """Print the script that completes pgqueue's commands and options in a shell.

    bash and zsh: eval "$(pgqueue completion bash)" in the shell's start file; fish: pgqueue completion fish | source.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(f"# {_INSTALL[shell]}")
    click.echo(kind(ctx.find_root().command, {}, "pgqueue", "_PGQUEUE_COMPLETE").source())
