r"""What is nearly an answer in a model's words: scales, other quantities, guesses, denials.

`@` stands for the reference, and none of these says it.
"""

BOXES = (
    r"@ \text{ million}", r"@ \text{ dozen eggs}", r"@ \text{ pairs}", r"@ \text{ thirds}",
    r"@ \text{ minus one apples}", r"\text{not } @", r"\text{at least } @", r"x + 1 = @",
    r"\text{The answer is not } @", r"@ \text{ is wrong}", r"\text{I guess } @", "(@, @)",
    r"x = @, y = 0", r"(x,y) = (@, 0)", "(C) @1", r"x < @ \text{ or } x > @", r"@ \text{ M}",
    r"0.@\%", r"@0\%", r"\text{five hundred}", r"@ \text{ tenths of a mile}",
    r"\color{white}@", r"\phantom{@}", "@e-05", r"\cancel{@}", r"@\bf 1",
)  # fmt: skip
TEXTS = (
    "Guess: @", "Step 3: @", "My guess is @.", "So we try @ next.", "So @ is too large.",
    "Therefore, she has more than @ apples.", "So he has twice @ apples.", "It took @ days",
    "So Ann has @ and Bob 3.", "The final answer is not $@$. I hope it is correct.",
    "<answer>@1</answer>", "<answer>@", "<answer>@ or 3</answer>", r"\boxed{@}, \boxed{3}",
    r"\boxed{@} <answer>3</answer>", r"<answer>@</answer> no, \boxed{3}",
    "Answer: @\nNo, it is 3.", "- @\n- 3", "Answer: @\n= 3", "Answer: @\nIt is negative.",
    r"\boxed{@} and \fbox{3}", r"\boxed{@}, \boxed(3)", r"\boxed{@} \boxed 3", "~~@~~",
)  # fmt: skip
