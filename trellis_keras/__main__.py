from trellis_keras.cli import main

main()
