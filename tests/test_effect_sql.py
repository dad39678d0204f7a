"""Which SQL an effect may be, and which must have a transaction to itself."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker.effect_sql import must_be_alone


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO sent (key) VALUES ($1)",
        "  \n\t insert into sent values ($1) returning id",
        "UPDATE n SET v = v + 1 WHERE id = $1",
        "delete from n",
        "MERGE INTO n USING m ON n.id = m.id WHEN MATCHED THEN DELETE",
        "INSERT INTO a SELECT * FROM b",
        "-- a remark; with SELECT\nINSERT INTO a VALUES (1)",
        "/* outer /* inner SELECT */ still; */ INSERT INTO a VALUES (1)",
        "INSERT INTO a VALUES (1);",
        "INSERT INTO a VALUES (1) ; -- done\n /* really */ ",
        "INSERT INTO a VALUES ('; COMMIT; SELECT')",
        "INSERT INTO a VALUES (E'it\\'s; COMMIT')",
        "INSERT INTO a VALUES (E'x' -- it goes on\n\t -- and on\r 'it\\'s; COMMIT' \n '; COMMIT')",
        "INSERT INTO a VALUES ('x'\n'b\\', '; COMMIT')",
        "INSERT INTO a VALUES ($$; COMMIT $$)",
        "INSERT INTO a VALUES ($q$; COMMIT $$ $q$)",
        'INSERT INTO "a;b" VALUES ($1)',
        "WITH b AS (SELECT 1 AS x) INSERT INTO a SELECT x FROM b",
        "WITH RECURSIVE b(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM b WHERE n < 3) INSERT INTO a SELECT n FROM b",
        "WITH insert AS (SELECT 1 AS x), b AS MATERIALIZED (SELECT 2) UPDATE a SET x = 1",
        "WITH gone AS (DELETE FROM a RETURNING x) INSERT INTO b SELECT x FROM gone",
    ],
)
def test_writing_rows_may_be_shared(sql: str) -> None:
    assert must_be_alone(sql) is False


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT set_config('app.tenant', $1, true)",
        "SELECT pg_advisory_xact_lock(1)",
        "(SELECT 1)",
        "WITH gone AS (DELETE FROM a RETURNING x) SELECT x FROM gone",
        "INSERT INTO a SELECT set_config('app.tenant', 'b', false)",
        "INSERT INTO a SELECT pg_catalog.SET_CONFIG ('app.tenant', 'b', false)",
        "INSERT INTO a SELECT \"set_config\"('app.tenant', 'b', false)",
        "UPDATE a SET x = pg_try_advisory_lock(1)",
    ],
)
def test_what_reads_or_sets_something_goes_alone(sql: str) -> None:
    assert must_be_alone(sql) is True


@pytest.mark.parametrize(
    "sql",
    [
        *("BEGIN", "COMMIT", "ROLLBACK", "START TRANSACTION", "END", "ABORT", "SAVEPOINT a", "RELEASE a"),
        *("PREPARE TRANSACTION 'a'", "SET search_path = a", "RESET ALL", "LISTEN a", "UNLISTEN *", "NOTIFY a"),
        *("COPY a FROM STDIN", "CALL p()", "DO $$BEGIN END$$"),
        *("CREATE TABLE a (x int)", "DROP TABLE a", "TRUNCATE a", "LOCK a", "VACUUM", "EXPLAIN SELECT 1", "PREPARE a AS SELECT 1"),
        *("DEALLOCATE ALL", "DISCARD ALL", "EXECUTE a", "DECLARE c CURSOR FOR SELECT 1", "VALUES (1)", "TABLE a", "GRANT a TO b"),
        *("", "   ", ";", "-- nothing", "/* nothing", "42", "/**/COMMIT", "WITH a AS (SELECT 1) TABLE a"),
    ],
)
def test_everything_else_is_refused_at_the_call(sql: str) -> None:
    with pytest.raises(ValueError, match=r"^effect: "):
        must_be_alone(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO a VALUES (1); COMMIT",
        "INSERT INTO a VALUES (1);;COMMIT",
        "INSERT INTO a VALUES (1); $$x$$",
        "INSERT INTO a VALUES (1); 'x'",
        "INSERT INTO a VALUES ('x\\'); COMMIT; --')",
        "INSERT INTO a VALUES ($$x$$); COMMIT",
        "INSERT INTO a VALUES (1) /* /* */ */; COMMIT",
        "INSERT INTO a VALUES ($1); INSERT INTO a VALUES ($2)",
        "INSERT INTO a VALUES (1) --\r; COMMIT",
        "INSERT INTO a VALUES (1 AS \u20ac$$); COMMIT --$$",
        "INSERT INTO a VALUES (1) \u00a0$$; COMMIT --$$",
        "INSERT INTO a VALUES ($\u00b2$; $\u00b2$); COMMIT",
        "INSERT INTO a VALUES (E'x'\n'b\\' , '); COMMIT; DELETE FROM a --')",
        "INSERT INTO a VALUES (E'x' -- it goes on\r\n 'b\\' , '); COMMIT; DELETE FROM a --')",
        "INSERT INTO a VALUES (E'x' 'b\\'); COMMIT; DELETE FROM a --')",
    ],
)
def test_a_second_statement_is_refused(sql: str) -> None:
    with pytest.raises(ValueError, match="one statement a call"):
        must_be_alone(sql)


@given(st.text(max_size=80))
@example("'" * 50 + "x")
@example("/*" * 40)
@example("$a$" * 20)
def test_any_text_is_either_accepted_or_refused_with_a_reason(text: str) -> None:
    try:
        assert must_be_alone(text) in (True, False)
    except ValueError as error:
        reason = str(error)
    else:
        return
    assert reason.startswith("effect: ")


@given(st.lists(st.sampled_from(["'", '"', "$$", "$a$", "/*", "*/", "--", "\n", ";", "COMMIT", "e'", "\\", "x", " "]), max_size=14))
def test_no_quoting_hides_a_commit_behind_a_separator(pieces: list[str]) -> None:
    """Whatever we take for one statement has no separator followed by a word outside quotes: checked by a second, slower reader."""
    sql = "INSERT INTO a VALUES (1) " + "".join(pieces)
    try:
        must_be_alone(sql)
    except ValueError:
        return
    assert "COMMIT" not in _after_a_separator(sql)


# What may stand between two parts of one text, as far as the pieces above can tell.
_GOES_ON = re.compile(r"[ ]*(?:--[^\n]*)?\n(?:[ \n]|--[^\n]*\n)*'")


def _after_a_separator(sql: str) -> str:
    at, ended, rest = 0, False, ""
    while at < len(sql):
        character, two = sql[at], sql[at : at + 2]
        if two == "--":
            at = sql.find("\n", at)
            if at < 0:
                break
        elif two == "/*":
            depth, at = 1, at + 2
            while at < len(sql) and depth:
                depth += (sql[at : at + 2] == "/*") - (sql[at : at + 2] == "*/")
                at += 2 if sql[at : at + 2] in ("/*", "*/") else 1
            continue
        elif character in "'\"":
            escapes = character == "'" and sql[at - 1 : at] in "eE" and not (sql[at - 2 : at - 1].isalnum() or sql[at - 2] in "_$")
            at += 1
            while at < len(sql) and sql[at] != character:
                at += 2 if escapes and sql[at] == "\\" else 1
                if escapes and sql[at : at + 1] == "'" and (more := _GOES_ON.match(sql, at + 1)):
                    at = more.end()
        elif character == "$" and not (sql[at - 1].isalnum() or sql[at - 1] in "_$"):
            mark = sql[at : sql.find("$", at + 1) + 1]
            if mark == "$$" or mark[1:-1].isidentifier():
                end = sql.find(mark, at + len(mark))
                at = len(sql) if end < 0 else end + len(mark) - 1
        elif character == ";":
            ended = True
        if ended and at < len(sql):
            rest += sql[at]
        at += 1
    return rest
