"""The PyTorch half of `mixed_job.rs`, which starts it; see there.

It trains a small network to tell English from German, on tensors that a Rust worker makes of sentences,
and then answers that worker's questions.
"""

import os

import tensorcall.rpc as rpc
import torch

ENGLISH = """the dog sleeps under the table
we are going to the market this morning
there is a light in the window
she reads a book about the stars
the children play in the garden with the ball
what do you think of the weather today
he wrote a long letter to his brother
the water of this lake is very cold""".splitlines()

GERMAN = """der Hund schläft unter dem Tisch
wir gehen heute Morgen auf den Markt
im Fenster steht ein Licht
sie liest ein Buch über die Sterne
die Kinder spielen im Garten mit dem Ball
was hältst du heute von dem Wetter
er schrieb seinem Bruder einen langen Brief
das Wasser in diesem See ist sehr kalt""".splitlines()

network: torch.nn.Module


@rpc.function
def classify(features):
    """Called by Rust, by this function's name: the language of each row."""
    if features.dim() != 2:
        raise ValueError(
            f"features have a row for each sentence, but these are of shape {list(features.shape)}"
        )
    with torch.no_grad():
        return ["English" if score > 0 else "German" for score in network(features)]


def train(features, targets):
    torch.manual_seed(1)
    network = torch.nn.Sequential(
        torch.nn.Linear(features.shape[1], 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(60):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(network(features), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network, loss.item()


def main():
    global network
    meeting = rpc.TensorPipeRpcBackendOptions(init_method=os.environ["EXAMPLE_MEETS_AT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc("model", rank=rank, world_size=size, rpc_backend_options=meeting)

    vocabulary = rpc.remote("words", "new_vocabulary")  # an object in Rust, by reference
    features = vocabulary.rpc_sync().encode(ENGLISH + GERMAN)  # a function of Rust, on that object
    print(f"model: got {features.dtype} {list(features.shape)} from {vocabulary.owner_name()}", flush=True)
    targets = torch.tensor([[1.0]] * len(ENGLISH) + [[0.0]] * len(GERMAN))
    network, loss = train(features, targets)
    vocabulary.rpc_sync().is_trained(loss)

    rpc.shutdown()  # answers until the Rust worker leaves too
    print("model: has left together with words", flush=True)


if __name__ == "__main__":
    main()
