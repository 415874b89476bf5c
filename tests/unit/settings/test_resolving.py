"""Settings from a file, the environment and flags: which wins, and what is refused with its place."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import typer

from trainmaster.cli.commands import server
from trainmaster.server.settings.resolution import (
    Resolved,
    SettingsError,
    SettingSource,
    example,
    line_of,
    meanings,
    resolve,
    settings,
    shown,
    shown_tables,
)
from trainmaster.server.settings.settings import NamedPath, Role, Settings, TransportKind
from trainmaster.server.settings.values import HIDDEN, kinds_of, read_text, read_toml, toml_of

FIELDS = {each.name: each for each in dataclasses.fields(Settings)}


def resolved(tmp_path: Path, text: str = "", *, flags: dict[str, object] | None = None, **variables: str) -> Resolved:
    """Settings with a file in the data directory."""
    if text:
        (tmp_path / "config.toml").write_text(text)
    return resolve({"data_dir": tmp_path, **(flags or {})}, environment=variables)


def problems(tmp_path: Path, text: str = "", **variables: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        resolved(tmp_path, text, **variables)
    return [str(problem).removeprefix(str(tmp_path) + "/") for problem in caught.value.problems]


# Which wins


def test_settings_without_any_source_are_the_defaults(tmp_path: Path) -> None:
    found = resolved(tmp_path)
    assert found.settings == Settings(data_dir=tmp_path)
    assert found.file is None
    assert found.origins["port"].source is SettingSource.DEFAULT


def test_later_source_wins_over_earlier(tmp_path: Path) -> None:
    text = "port = 1\nhost = '127.0.0.2'\nslots_per_node = 3\n"
    found = resolved(tmp_path, text, flags={"port": 3}, TRAINMASTER_PORT="2", TRAINMASTER_HOST="127.0.0.3")
    assert (found.settings.port, found.settings.host, found.settings.slots_per_node) == (3, "127.0.0.3", 3)
    origins = found.origins
    assert (origins["port"].source, origins["port"].place) == (SettingSource.FLAG, "--port")
    assert (origins["host"].source, origins["host"].place) == (SettingSource.ENVIRONMENT, "TRAINMASTER_HOST")
    assert (origins["slots_per_node"].source, origins["slots_per_node"].place) == (
        SettingSource.FILE,
        f"{tmp_path / 'config.toml'}:3",
    )


def test_named_file_wins_over_the_variable_and_the_data_directory(tmp_path: Path) -> None:
    for name, port in (("config.toml", 1), ("by-variable.toml", 2), ("by-flag.toml", 3)):
        (tmp_path / name).write_text(f"port = {port}\n")
    variables = {"TRAINMASTER_CONFIG": str(tmp_path / "by-variable.toml")}
    flags = {"data_dir": tmp_path}
    assert resolve(flags, environment={}).settings.port == 1
    assert resolve(flags, environment=variables).settings.port == 2
    assert resolve(flags, environment=variables, config=tmp_path / "by-flag.toml").settings.port == 3


def test_named_file_may_say_where_the_data_directory_is(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("data_dir = 'state'\nruns_root = 'runs'\n")
    found = resolve(environment={"TRAINMASTER_HOME": "/nowhere"}, config=tmp_path / "a.toml").settings
    assert (found.data_dir, found.runs_root) == (tmp_path / "state", tmp_path / "runs")
    assert resolve(environment={"TRAINMASTER_HOME": str(tmp_path / "home")}).settings.data_dir == tmp_path / "home"


def test_file_in_the_data_directory_cannot_move_it(tmp_path: Path) -> None:
    assert "cannot be another" in problems_of(
        tmp_path, "data_dir = '/elsewhere'\n", {"TRAINMASTER_HOME": str(tmp_path)}
    )


def problems_of(tmp_path: Path, text: str, environment: dict[str, str]) -> str:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        resolve(environment=environment)
    return str(caught.value)


def test_variables_have_the_types_of_their_fields(tmp_path: Path) -> None:
    found = resolved(
        tmp_path,
        TRAINMASTER_ROLES="api, gateway",
        TRAINMASTER_DATA_ROOTS="/a,/b",
        TRAINMASTER_TRANSPORT="http",
        TRAINMASTER_LEASE_S="2.5",
        TRAINMASTER_WEBHOOK_PRIVATE_ADDRESSES="yes",
        TRAINMASTER_SIMULATED_GPUS="H100-80GB:8,A100-40GB:4",
    ).settings
    assert found.roles == {Role.API, Role.GATEWAY}
    assert found.data_roots == (Path("/a"), Path("/b"))
    assert found.transport is TransportKind.HTTP
    assert found.lease_s == 2.5
    assert found.webhook_private_addresses is True
    assert found.simulated_gpus == "H100-80GB:8,A100-40GB:4"


def test_variables_of_clients_and_jobs_are_no_settings(tmp_path: Path) -> None:
    others = ("URL", "API_KEY", "HOME", "DEBUG", "JOB_ID", "ATTEMPT_ID", "EVENTS_FILE", "FAILPOINT")
    resolved(tmp_path, **{f"TRAINMASTER_{name}": "x" for name in others}, TRAINMASTER_PORT="")


def test_variable_of_the_default_is_told() -> None:
    origin = resolve(environment={"TRAINMASTER_HOME": "/nowhere"}).origins["data_dir"]
    assert (origin.source, origin.place) == (SettingSource.ENVIRONMENT, "TRAINMASTER_HOME")


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").mkdir()
    assert problems(tmp_path) == ["config.toml: cannot be read: Is a directory"]
    (tmp_path / "config.toml").rmdir()
    (tmp_path / "config.toml").write_bytes(b"\xff")
    assert problems(tmp_path) == ["config.toml: is not valid TOML: it is no UTF-8"]


def test_flag_is_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = resolve({"data_dir": Path("state"), "data_roots": [Path("a"), Path("/b")]}, environment={}).settings
    assert (found.data_dir, found.data_roots) == (tmp_path / "state", (tmp_path / "a", Path("/b")))


# What is refused


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prot = 1", "config.toml:1: prot: unknown setting; did you mean 'port'?"),
        ("\n\nzzz = 1", "config.toml:3: zzz: unknown setting; `trainmaster config` lists what there is"),
        ("port = '1'", "config.toml:1: port: must be a whole number"),
        ("port = true", "config.toml:1: port: must be a whole number"),
        ("port = 70000", "config.toml:1: port: must be at most 65535"),
        ("lease_s = nan", "config.toml:1: lease_s: must be a number"),
        ("lease_s = 0", "config.toml:1: lease_s: must be at least 0.1"),
        ("roles = 'api'", "config.toml:1: roles: must be a list of any of api, coordinator, gateway"),
        ("roles = ['boss']", "config.toml:1: roles: 'boss' is none of: api, coordinator, gateway"),
        ("roles = []", "config.toml:1: roles: must not be empty"),
        ("backends = [1]", "config.toml:1: backends: must be a text"),
        ("[port]\nx = 1", "config.toml:1: port: must be a whole number"),
        ("[queue.a]", "config.toml:1: queue: unknown setting; did you mean 'queues'?"),
        ("queues = 1", "config.toml:1: queues: must be a table: write [queues.NAME]"),
        ("[queues.a]\nwieght = 1", "config.toml:2: queues.a.wieght: unknown key; did you mean 'weight'?"),
        ("[queues.a]\nweight = 0", "config.toml:2: queues.a.weight: must be at least 0.001"),
        ("[queues.a]\nquota_gpus = -1", "config.toml:2: queues.a.quota_gpus: must be at least 0"),
        ("[nodes.'a b']\nlabels = 'x'", "config.toml:2: nodes.a b.labels: must be a list of texts"),
        ("[accounts.a]\nuid = 'x'", "config.toml:2: accounts.a.uid: must be a whole number"),
        ("[webhooks.a]\nurl = 'http://a'", "config.toml:1: webhooks.a: needs secret: a text"),
    ],
)
def test_file_that_is_wrong_is_refused_with_the_place(tmp_path: Path, text: str, problem: str) -> None:
    assert problems(tmp_path, text) == [problem]


def test_names_that_no_account_can_have_are_refused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "[accounts.'../x']\n")
    assert problem.startswith("config.toml:1: accounts.../x: names have letters")
    (problem,) = problems(tmp_path, "[webhooks.x]\nurl = 'http://a'\nsecret = 'x'\naccount = '../x'\n")
    assert problem.startswith("config.toml:4: webhooks.x.account: names have letters")


@pytest.mark.parametrize("text", ["port = ", "port = 1\nport = 2", "\x00"])
def test_file_that_is_no_toml_is_refused_with_the_line(tmp_path: Path, text: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert problem.startswith("config.toml: is not valid TOML: ")


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        resolve({"data_dir": tmp_path}, environment={}, config=tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        ("TRAINMASTER_PROT", "1", "TRAINMASTER_PROT: unknown setting; did you mean 'TRAINMASTER_PORT'?"),
        ("TRAINMASTER_PORT", "tcp://10.0.0.1:70", "TRAINMASTER_PORT: must be a whole number"),
        ("TRAINMASTER_ROLES", "api,boss", "TRAINMASTER_ROLES: 'boss' is none of: api, coordinator, gateway"),
        ("TRAINMASTER_OPEN_METRICS", "maybe", "TRAINMASTER_OPEN_METRICS: must be true or false"),
    ],
)
def test_variable_that_is_wrong_is_refused(tmp_path: Path, variable: str, text: str, problem: str) -> None:
    assert problems(tmp_path, **{variable: text}) == [problem]


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    assert len(problems(tmp_path, "prot = 1\nport = 'x'\n[queues.a]\nx = 1\n", TRAINMASTER_X="1")) == 4


def test_secret_that_is_wrong_is_not_repeated(tmp_path: Path) -> None:
    assert "hunter2" not in "".join(problems(tmp_path, "secret_key = ['hunter2']\n"))


# The tables


def test_tables_are_read_by_name(tmp_path: Path) -> None:
    text = """
        [queues.research]
        weight = 2
        quota_gpus = 8
        [queues.default]
        [nodes."gpu box/1"]
        labels = ["rack-3"]
        [accounts.vision]
        uid = 1500
        [webhooks.chat]
        url = "https://hooks.example.com"
        statuses = ["FAILED"]
        secret = "sixteen characters"
    """
    declared = resolved(tmp_path, text).declared
    assert declared.queues["research"].weight == 2.0
    assert declared.queues["default"].quota_gpus is None
    assert declared.nodes["gpu box/1"].labels == ("rack-3",)
    assert declared.nodes["gpu box/1"].capabilities is None
    assert declared.accounts["vision"].uid == 1500
    assert (declared.webhooks["chat"].account, declared.webhooks["chat"].statuses) == ("default", ("FAILED",))


# What is shown


def test_every_setting_has_a_meaning_and_a_type_that_can_be_read() -> None:
    assert set(meanings(Settings)) == set(FIELDS)
    for each in settings():
        assert each.type


@pytest.mark.parametrize("name", FIELDS)
def test_default_can_be_written_and_read_again(name: str, tmp_path: Path) -> None:
    default = FIELDS[name].default
    if default is dataclasses.MISSING:
        return
    import tomllib

    raw = tomllib.loads(f"x = {toml_of(default)}")["x"]
    assert read_toml(FIELDS[name], kinds_of(Settings)[name], raw, tmp_path) == default


def test_example_loads_and_changes_nothing(tmp_path: Path) -> None:
    found = resolved(tmp_path, example())
    assert found.settings == Settings(data_dir=tmp_path)
    assert not found.declared.queues


def test_example_without_its_comment_signs_has_every_default(tmp_path: Path) -> None:
    text = "\n".join(
        line.removeprefix("#") for line in example().splitlines() if not line.startswith(("# ", "#data_dir"))
    )
    found = resolved(tmp_path, text)
    assert found.settings == Settings(data_dir=tmp_path)
    assert {origin.source for name, origin in found.origins.items() if name != "data_dir"} == {SettingSource.FILE}
    assert set(found.declared.queues) == {"research"}
    assert set(found.declared.webhooks) == {"chat"}


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    text = "secret_key = 'canary'\ndatabase_url = 'postgresql://me:canary@host/db'\n"
    text += "[webhooks.a]\nurl = 'http://a'\nsecret = 'canary-canary-canary'\n"
    found = resolved(tmp_path, text)
    everything = repr([*shown(found), shown_tables(found), found])
    assert "canary" not in everything
    values = {each.name: value for each, value, _ in shown(found)}
    assert values["secret_key"] == HIDDEN
    assert values["database_url"] == "postgresql://me:***@host/db"
    assert not values["old_secret_keys"]


def test_flags_of_the_fields_are_those_of_serve() -> None:
    command: Any = typer.main.get_command(_app_of_serve())
    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    completion = {"--install-completion", "--show-completion"}
    flags = {each.flag for each in settings() if each.flag}
    assert options - completion - {"--config", "--free-port", "--help"} == flags


def _app_of_serve() -> typer.Typer:
    app = typer.Typer()
    app.command()(server.serve)
    return app


def test_line_of_a_key_is_found_in_its_table() -> None:
    text = 'a = 1\n[t]\n  b = 2\n[t."x y"]\nb = [\n  1,\n]\nc.d = 3\n'
    assert [line_of(text, path) for path in (("a",), ("t", "b"), ("t", "x y", "b"), ("t", "x y", "c", "d"))] == [
        1,
        3,
        5,
        8,
    ]
    assert line_of(text, ("nothing",)) is None


@pytest.mark.parametrize("word", ["true", "Yes", "1", "on"])
def test_truth_has_several_words(word: str) -> None:
    assert read_text(FIELDS["open_metrics"], bool, word, Path("/")) is True


@pytest.mark.parametrize(
    ("url", "shown_as"),
    [
        ("postgresql://me:canary@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:can/ary@host/db", "postgresql://me:***@host/db"),
        ("postgresql://host/db?user=me&password=canary&sslmode=require", "***&sslmode=require"),
    ],
)
def test_password_of_a_database_is_hidden_and_no_flag(tmp_path: Path, url: str, shown_as: str) -> None:
    found = resolve({"data_dir": tmp_path}, environment={"TRAINMASTER_DATABASE_URL": url})
    values = {each.name: value for each, value, _ in shown(found)}
    assert "ary" not in str(values["database_url"])
    assert str(values["database_url"]).endswith(shown_as)
    assert found.settings.database_url == url
    with pytest.raises(SettingsError) as refused:
        resolve({"data_dir": tmp_path, "database_url": url}, environment={})
    assert "TRAINMASTER_DATABASE_URL" in str(refused.value)
    assert "ary" not in str(refused.value)
    plain = "postgresql://me@host/db?sslmode=require"
    assert resolve({"data_dir": tmp_path, "database_url": plain}, environment={}).settings.database_url == plain


# Names of models


def test_model_aliases_come_from_every_source(tmp_path: Path) -> None:
    text = 'model_aliases = ["Qwen/Qwen3-8B=models/a", "accounts/f/models/b = /models/b=c"]'
    found = resolved(tmp_path, text).settings.model_aliases
    assert found == (
        NamedPath("Qwen/Qwen3-8B", tmp_path / "models/a"),
        NamedPath("accounts/f/models/b", Path("/models/b=c")),
    )
    by_variable = resolved(tmp_path, TRAINMASTER_MODEL_ALIASES="a=/a,b=/b").settings.model_aliases
    assert by_variable == (NamedPath("a", Path("/a")), NamedPath("b", Path("/b")))
    by_flag = resolved(tmp_path, flags={"model_aliases": ["a=/x", "b=/y"]}).settings.model_aliases
    assert [str(each) for each in by_flag] == ["a=/x", "b=/y"]


@pytest.mark.parametrize("value", ["nothing", "=/a", "a=", 7])
def test_model_alias_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    (problem,) = problems(tmp_path, f"model_aliases = [{value!r}]")
    assert "NAME=PATH" in problem
