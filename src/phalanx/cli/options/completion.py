"""Generates shell completion scripts: phalanx run --print-completion bash >> ~/.bashrc"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli.options.option import Option
from phalanx.cli.options.table import OPTIONS, options_of


def completion(shell: str) -> str:
    """Return the completion script for bash, zsh or tcsh."""
    from phalanx.cli.main import VERBS

    return {"bash": _bash, "zsh": _zsh, "tcsh": _tcsh}[shell](tuple(VERBS))


def choices(option: Option) -> tuple[str, ...]:
    """Return the values to offer: the lower-case words of the metavar."""
    if option.kind is None:
        return ()
    return tuple(word for word in option.kind.metavar.split("|") if word.islower() and word.replace("-", "").isalnum())


def _is_folder(option: Option) -> bool:
    return option.kind is not None and option.kind.metavar == "DIR"


_BASH = """\
# Completes phalanx run, plan and chaos, up to the script; after it, files.
_phalanx() {
    local cur=${COMP_WORDS[COMP_CWORD]} option= script= verb=${COMP_WORDS[1]} word i IFS=$' \\t\\n'
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "@VERBS@" -- "$cur"))
        return
    fi
    [[ $verb == run || $verb == plan || $verb == chaos ]] || return
    # bash takes --option=value for three words, the second of them "=".
    for ((i = 2; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ $word == "=" ]]; then
            option=${COMP_WORDS[i - 1]}
        elif [[ -n $option ]]; then
            option=
        elif [[ $word == -* ]]; then
            case $word in
                @VALUED@) option=$word ;;
            esac
        else
            script=$word
            break
        fi
    done
    if [[ $cur == "=" ]]; then
        option=${COMP_WORDS[COMP_CWORD - 1]}
        cur=
    fi
    if [[ -n $script ]]; then
        IFS=$'\\n' # names of files may have spaces
        COMPREPLY=($(compgen -f -- "$cur"))
    elif [[ -n $option ]]; then
        case $option in
@VALUES@
        esac
    elif [[ $cur == -*_* ]]; then
        COMPREPLY=($(compgen -W "@UNDERSCORED@" -- "$cur"))
    elif [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "@DASHED@" -- "$cur"))
        [[ $verb == plan ]] && COMPREPLY+=($(compgen -W "@PLAN@" -- "$cur"))
        [[ $verb == chaos ]] && COMPREPLY+=($(compgen -W "@CHAOS@" -- "$cur"))
    else
        IFS=$'\\n'
        COMPREPLY=($(compgen -f -X '!*.py' -- "$cur") $(compgen -d -- "$cur"))
    fi
}
complete -o filenames -o bashdefault -F _phalanx phalanx
"""


def _bash(verbs: Sequence[str]) -> str:
    options = options_of("run")
    values = []
    for option in options:
        names = "|".join(option.spellings)
        if _is_folder(option):
            values.append(f"            {names}) IFS=$'\\n' COMPREPLY=($(compgen -d -- \"$cur\")) ;;")
        elif option.attached or choices(option):
            words = " ".join(option.attached or choices(option))
            values.append(f'            {names}) COMPREPLY=($(compgen -W "{words}" -- "$cur")) ;;')
    filled = {
        "VERBS": " ".join(verbs),
        "VALUED": "|".join(name for option in OPTIONS if option.kind for name in option.spellings),
        "VALUES": "\n".join(values),
        "UNDERSCORED": " ".join(name for option in options for name in option.spellings if "_" in name),
        "DASHED": " ".join(name for option in options for name in option.shown),
        "PLAN": " ".join(option.name for option in options_of("plan") if option.only),
        "CHAOS": " ".join(option.name for option in options_of("chaos") if option.only),
    }
    script = _BASH
    for name, text in filled.items():
        script = script.replace(f"@{name}@", text)
    return script


def _zsh(verbs: Sequence[str]) -> str:
    lines = [
        "#compdef phalanx",
        "# Completes phalanx run, plan and chaos, up to the script; after it, files.",
        "",
    ]
    lines += ["_phalanx_options() {", "    local -a options=("]
    lines += [f"        {_zsh_spec(name, option)}" for option in options_of("run") for name in option.shown]
    lines += ["    )"]
    for option in OPTIONS:
        if option.only:
            lines.append(f"    [[ $1 == {option.only} ]] && options+=({_zsh_spec(option.name, option)})")
    lines += ['    _arguments -S -A "-*" $options "1:script:_files" "*::arguments:_files"', "}", ""]
    lines += [
        "_phalanx() {",
        "    local curcontext=$curcontext state line",
        f'    _arguments -C "1:verb:({" ".join(verbs)})" "*::rest:->rest"',
    ]
    lines += [
        "    case $state:$words[1] in",
        "        rest:(run|plan|chaos)) _phalanx_options $words[1] ;;",
        "    esac",
        "}",
        "",
    ]
    lines += ['if [[ $funcstack[1] == _phalanx ]]; then _phalanx "$@"; else compdef _phalanx phalanx; fi']
    return "\n".join(lines) + "\n"


def _zsh_spec(name: str, option: Option) -> str:
    def quoted(text: str) -> str:
        return "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in text).replace("'", "'\\''")

    star = "*" if option.kind is not None and option.kind.repeated else ""
    if option.kind is None:
        return f"'{name}[{quoted(option.help)}]'"
    offered = "_directories" if _is_folder(option) else f"({' '.join(choices(option))})" if choices(option) else " "
    equals = "=" if name.startswith("--") else "+"
    return f"'{star}{name}{equals}[{quoted(option.help)}]:{quoted(option.kind.metavar)}:{offered}'"


def _tcsh(verbs: Sequence[str]) -> str:
    options = options_of("run")
    rules = [f"'p/1/({' '.join(verbs)})/'"]
    for option in options:
        offered = "d" if _is_folder(option) else f"({' '.join(choices(option))})" if choices(option) else ""
        if offered:
            rules += [f"'n/{name}/{offered}/'" for name in option.spellings]
    rules.append(f"'c/--/({' '.join(option.name[2:] for option in options)})/'")
    rules.append("'p/*/f/'")
    return "# Completes phalanx run.\ncomplete phalanx " + " \\\n    ".join(rules) + "\n"
