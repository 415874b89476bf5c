"""The types of the REST API's answers: the server's OpenAPI document is made of them, and the client returns them.

They are plain dictionaries with known keys, as they come over the wire. A newer server may send more keys and more
values of an enumeration. Imports neither pydantic nor anything that talks HTTP.
"""
