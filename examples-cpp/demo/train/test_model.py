"""The chunked forms of model.py against the plain recurrences, and the exported model one byte at a time against it.

    python3 test_model.py
"""

import torch
import torch.nn.functional as F

from export import export_tensors
from model import MODEL, Model, delta_rule, ssd
from reference import Reference

TOLERANCE = 1e-4


def plain_ssd(x, dt, A, B, C, S):
    out = []
    for t in range(x.shape[1]):
        S = S * (dt[:, t] * A).exp()[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, None, None]
        out.append((S * C[:, t, None, None]).sum(-1))
    return torch.stack(out, 1), S


def plain_delta_rule(q, k, v, g, beta, S):
    out = []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, None].exp()
        u = beta[:, t, :, None] * (v[:, t] - (S * k[:, t, :, None]).sum(-1))
        S = S + u[..., None] * k[:, t, :, None]
        out.append((S * q[:, t, :, None]).sum(-1))
    return torch.stack(out, 1), S


def differences(chunked, plain):
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in zip(chunked, plain))


def check_ssd():
    x, B, C = torch.randn(2, 256, 3, 16), torch.randn(2, 256, 32), torch.randn(2, 256, 32)
    dt, A, S = 0.1 * torch.rand(2, 256, 3), -1 - 15 * torch.rand(3), torch.randn(2, 3, 16, 32)
    return differences(ssd(x, dt, A, B, C, S, 64), plain_ssd(x, dt, A, B, C, S))


def check_delta_rule(channels, strongest, one_key):
    """Log decays down to `strongest`; with one_key, all keys are nearly the same and beta is near 1."""
    q, k, v = (torch.randn(2, 256, 3, n) for n in (32, 32, 16))
    if one_key:
        k = torch.randn(2, 1, 3, 32) + 0.01 * k
    beta = torch.randn(2, 256, 3).sigmoid() if not one_key else 0.95 + 0.05 * torch.rand(2, 256, 3)
    q, k, S = F.normalize(q, dim=-1), F.normalize(k, dim=-1), torch.randn(2, 3, 16, 32)
    g = strongest * torch.rand(2, 256, 3, channels) ** 4
    inputs = [y.requires_grad_() for y in (q, k, v, g, beta, S)]
    results, gradients, weight = [], [], torch.randn(2, 256, 3, 16)
    for form in (lambda *y: delta_rule(*y, 64), plain_delta_rule):
        result = form(*inputs)
        gradients.append(torch.autograd.grad((result[0] * weight).sum() + result[1].sum(), inputs))
        results.append(result)
    return max(differences(*results), differences(*gradients))


def check_model():
    """All of a small model in fp64: two segments with carried state against one byte at a time from the exported file."""
    model = Model().eval()
    tensors = export_tensors(model)
    for name, p in model.named_parameters():
        p.data = p.data.to(torch.bfloat16).float() if p.dim() == 2 else p.data
    model = model.double()
    text = torch.randint(256, (2, 128))
    with torch.no_grad():
        first, state = model(text[:, :64], model.zero_state(2))
        hidden = torch.cat([first, model(text[:, 64:], state)[0]], 1)
        ref = Reference(tensors, MODEL, dtype=torch.float64)
        state = ref.zero_state(2)
        return (torch.stack([ref.step(byte, state) for byte in text.T], 1) - hidden).abs().max().item()


def main():
    torch.manual_seed(1)
    checks = {"ssd": check_ssd()}
    for channels, name in ((1, "one decay a head"), (32, "a decay a channel")):
        for strongest in (-0.1, -30):
            for one_key in (False, True):
                case = f"delta_rule, {name}, log decays to {strongest}, {'one key' if one_key else 'random keys'}"
                checks[case] = check_delta_rule(channels, strongest, one_key)
    checks["model, parallel - one byte at a time, fp64"] = check_model()
    for name, difference in checks.items():
        print(f"{name:70}{difference:.1e}")
    if max(checks.values()) > TOLERANCE:
        raise SystemExit("the forms differ")


if __name__ == "__main__":
    main()
