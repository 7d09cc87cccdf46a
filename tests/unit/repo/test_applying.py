"""Bodies of server-side apply: whatever other programs said, the API server's YAML decoder can read it."""

import yaml
from hypothesis import given
from hypothesis import strategies as st

from rolloutfleet.contract.applying import apply_body


def test_an_emoji_in_an_error_message_travels_as_itself():
    body = apply_body({"status": {"message": "GLHF! \U0001f3d6\ufe0f"}})
    assert b"\\ud83c" not in body
    assert yaml.safe_load(body) == {"status": {"message": "GLHF! \U0001f3d6\ufe0f"}}


@given(st.text(alphabet=st.characters(codec=None)))
def test_any_text_can_be_read_as_yaml(text: str):
    assert isinstance(yaml.safe_load(apply_body({"message": text}))["message"], str)
